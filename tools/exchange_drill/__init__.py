"""The parts of `tools/drill_exchange.py`, and of `tools/fuzz_exchange.py`.

- `workload`   records that are made from their number alone
- `journals`   what a process has done, in a file that survives its death
- `serve`      the daemon as a process
- `part`       producer and consumer as processes
- `process`    one process: started, killed, stopped, watched
- `rig`        daemon, producers and consumer of one drill, and the check that every record came once
- `faults`     deaths, pauses, and a full disk
- `network`    a partition between network namespaces
- `clients`    a bare client that says what it likes
- `hostile`    authenticated clients that want the daemon's memory
- `memory`     how much of it they get
- `torn`       a write-ahead log that was written in part, or spoiled
- `outcome`    what a drill found, as a row
- `stage`      the daemon's core alone, and what has to hold whatever is said to it
- `seeds`      conversations, and how to spoil them
"""
