"""Parts of `tools/bench_learner.py`, which compares training by mrl with training by TRL.

answers.py lengths of answers, as chances that an answer ends policy.py a policy whose answers have these lengths, made
in closed form load.py what both sides have to train: the loads, and the files that say it to either side environment.py
TRL's environment in the user's cache trl_side.py a TRL process; runs in that environment and imports nothing of mrl
verdict.py TRL's reward function trl_run.py starts TRL processes and reads their output spent.py CPU seconds of a tree
of processes mrl_run.py starts `mrl train` and reads the CPU seconds that it spends gate.py checks that both sides
compute the same log-probabilities and optimizer step, else nothing is compared
"""
