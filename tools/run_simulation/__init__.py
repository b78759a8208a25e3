"""A whole run in one process: real cores, a virtual clock, a network that fails, processes that die (`simulate_run`).

- `world`     time, hosts, processes: killed, stopped, gone on with; what is due runs one event at a time
- `network`   links between them: late, cut, half-open, reset
- `daemons`   the exchange with its file, and the allocator of units
- `policies`  a learner and a worker around their real books and links; training and sampling take time and no tensors
- `hosts`     the real supervision of processes, and the real node of units, over simulated processes
- `faults`    what goes wrong when, by seed
- `witness`   what must hold
- `planted`   mistakes in the real code that the witness has to find
- `trial`     one seed from its start to its verdict
"""
