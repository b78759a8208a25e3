"""The parts of `tools/chaos.py`: a training run whose roles are killed and stopped at random, and what it is held to.

faults   which process is hit next, how, and when it was replaced
trial    one run: its processes, its faults, the versions that it published, what it leaves behind
witness  a client of the run's exchange that remembers every acknowledged record
outcome  what the metrics of a run say
"""
