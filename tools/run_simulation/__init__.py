"""Parts of `tools/simulate_run.py`: a whole run in one process, with real cores and simulated surroundings.

Clock, network and processes are simulated; the network fails, and processes die.

- `world`     time, hosts, processes, which may be killed, stopped and continued; runs one event at a time
- `network`   links between processes: late, cut, half-open, reset
- `daemons`   the exchange with its file, and the allocator of units
- `policies`  a learner and a worker around their real books and links; training and sampling take time and no tensors
- `hosts`     the real supervision of processes, and the real node of units, over simulated processes
- `faults`    faults and their times, by seed
- `witness`   checks of the laws that must hold
- `planted`   mistakes in the real code that the witness has to find
- `trial`     one seed from its start to its verdict
"""
