"""Parts of `tools/chaos.py`: a training run whose roles are killed and stopped at random.

faults   chooses the process that is hit next, and the fault; notes when it was replaced
trial    one run: its processes, its faults, the versions that it published, the processes that it leaves behind
witness  a client of the run's exchange that remembers every acknowledged record
outcome  rewards, accuracies and slots from the metrics of a run
slots    slots that workers had in use by their own logs
"""
