"""The training benchmark: what `bench_learner.py` compares, and the two sides that it compares.

answers.py      how long answers are, as chances that an answer ends
policy.py       a policy whose answers have these lengths, made in closed form
load.py         what both sides have to train: the loads, and the files that say it to either side
environment.py  TRL's environment in the user's cache
trl_side.py     a TRL process; runs in that environment and imports nothing of mrl
verdict.py      TRL's reward function
trl_run.py      starts TRL processes and reads what they say
spent.py        CPU seconds of a tree of processes
mrl_run.py      starts `mrl train` and reads what it spends
gate.py         the same log-probabilities and the same optimizer step, or there is nothing to compare
"""
