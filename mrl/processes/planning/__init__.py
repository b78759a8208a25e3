"""Which processes a run has and what becomes of them, decided without starting any.

- `plan`         a configuration becomes a list of processes, with their commands and environments
- `hosts`        names and addresses of several hosts, and how a command gets there
- `devices`      which GPUs each process sees
- `placement`    on which host and GPUs each of them goes
- `restarts`     what to do when a process ended
- `lifecycle`    the phases of a run, and when to send which signal to end it
- `log_lines`    what the log of a process says: warnings, and why it ended
- `slurm`        batch scripts for several hosts, over the same command
- `dry_run`      what a launch would start, as text

Invariant: everything here is a function of its arguments; starting, signalling and waiting belong to `mrl.processes`.
"""
