"""Exchange (SEE in the paper, arXiv 2605.07244): the daemon through which policies pass each other their experience.

Protocol: `mrl.records.exchange`. Learners and workers speak to it through `client`, which never blocks them.

Invariants: what was acknowledged is on the log, and is delivered, or evicted and counted; nothing is stored or
delivered that is older than allowed, counted in versions of its source and never by a clock; memory, log and watches
are bounded; a late or missing exchange costs peer data and nothing else. No torch, no transformers.

- `versions`  newest version and resume points of every policy: the age of a record, and whether it is void
- `shelf`     the success memory: per policy and prompt the newest successes, within a byte budget
- `watches`   who waits for which prompt
- `sessions`  what the daemon remembers about one client
- `flows`     what went from which policy to which
- `core`      every decision of the daemon, with no socket, clock or file in it
- `log`       the append log that outlives the daemon
- `daemon`    core, log and server socket put together
- `client`    the other end of the conversation, which never blocks its caller
- `inbox`     what the client was given and nobody has taken yet
"""
