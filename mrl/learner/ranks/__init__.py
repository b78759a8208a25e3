"""The ranks of one learner: their numbers and hosts, how they meet, and a watch that names the awaited rank in a stall.

- `world`          process group of the ranks: sums, broadcasts
- `context_group`  ranks that share the places of each pass
- `learner_turn`   turns of the ranks on devices that other processes use, too
- `rank_place`     number of this rank, and the hosts that the ranks live on
- `rendezvous`     meeting of the ranks of several hosts, once for every life of the learner
- `host_board`     activities of the ranks of several hosts
- `own_address`    address and interface by which other hosts reach this one
- `watchdog`       activities of the ranks of one host, and the end of a rank that waits for too long
"""
