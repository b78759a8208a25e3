"""The ranks of one learner: who they are, how they meet, and who is awaited when they go on no longer.

- `world`       their process group: shares, sums, broadcasts
- `context_group` ranks that share the places of each pass
- `rank_place`  the number of this rank, and the hosts that the ranks live on
- `meeting`     how the ranks of several hosts find each other, once for every life of the learner
- `host_board`  what ranks of other hosts are at
- `own_address` the address and the interface by which other hosts reach this one
- `watchdog`    who is awaited, and the end of a rank that waits for too long
"""
