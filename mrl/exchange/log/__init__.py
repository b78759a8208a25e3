"""The exchange's log: what a daemon accepted, in order, so that the next one finds it again.

Invariants: what `append` has returned is there after a `kill -9`, and with `synced` after a power cut; a torn end is
cut, damage inside is set aside and counted, and neither is ever taken for an entry; all segments together keep within
their bound, and a full disk costs time, not entries.

- `disk`      the system calls, and how they may fail
- `frames`    entries on the disk, and how they are found again
- `recovery`  what a folder still holds at the start
- `reading`   the same for a person: it changes nothing, and needs no lock
- `places`    the log as readers of the same host see it
- `segments`  the log itself: append, roll, release
- `writer`    the thread that appends in groups, so that the daemon's loop never waits for the disk
"""
