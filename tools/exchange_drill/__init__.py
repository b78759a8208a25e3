"""Parts of `tools/drill_exchange.py`, which tries to break the exchange daemon.

- `workload`   records that are made from their number alone
- `journals`   journal of a process, in a file that survives its death
- `serve`      the daemon as a process
- `part`       producer and consumer as processes
- `process`    one process: started, killed, stopped, watched
- `rig`        daemon, producers and consumer of one drill, and the check that every record came once
- `faults`     deaths, pauses, and a full disk
- `network`    a partition between network namespaces
- `clients`    a bare client, which may send anything
- `hostile`    authenticated clients that want the daemon's memory
- `memory`     the daemon's memory under these attacks
- `torn`       a write-ahead log that was written in part, or spoiled
- `outcome`    results of a drill, as a row
"""
