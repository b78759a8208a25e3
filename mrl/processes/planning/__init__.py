"""Decide which processes a run has, where they run and what follows their end, without starting any.

- `plan`           turns a configuration into a list of processes, with their commands and environments
- `hosts`          names and addresses of several hosts, and commands that reach them
- `devices`        GPUs that this host shows
- `placement`      host and GPUs of each process
- `unit_workers`   units of a host, and the environment of a worker on a unit
- `time_sharing`   devices that processes use one after the other
- `torchrun`       command and environment of a learner's ranks
- `local_folder`   the folder that processes of one run share on one host
- `restarts`       what to do when a process has ended
- `lifecycle`      the phases of a run, and when to send which signal to end it
- `log_lines`      warnings, and the reason of a process's end, in its log
- `slurm`          batch scripts for several hosts, over the same command
- `dry_run`        what a launch would start, as text

Nothing here starts, signals or awaits a process of a run; that belongs to `mrl.processes`.
"""
