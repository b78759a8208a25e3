"""Exchange (SEE in the paper, arXiv 2605.07244): the daemon through which policies pass each other their experience.

Protocol: `mrl.records.exchange`. Learners and workers speak to it through `client`, which blocks them only where they
ask for it, and with a bound.

Invariants: what was acknowledged is on the log, and is delivered, or evicted and counted; nothing is stored or
delivered that is older than allowed, counted in versions of its source and never by a clock; memory, log and watches
are bounded; a late or missing exchange costs peer data and nothing else (a synchronous run, which is made of waiting
for each other, ends when a barrier's time runs out). No torch, no transformers.

The daemon:
- `kinds`          what depends on a record's type: how many are kept, for whom they are
- `versions`       newest version and resume points of every policy: the age of a record, and whether it is void
- `shelf`          per type, policy and prompt the newest records, within a byte budget
- `watches`        who waits for which prompt
- `flows`          what went from which policy to which
- `matching`       what answers a question, and whose watch takes a newcomer
- `subscriptions`  requests to a policy, each handed to one of its clients at a time
- `barriers`       where policies in step wait for each other
- `sessions`       what the daemon remembers about one client
- `core`           every decision of the daemon, with no socket, clock or file in it
- `log`            the append log that outlives the daemon
- `daemon`         core, log and server socket put together

The other end of the conversation:
- `client`         what learners and workers call
- `puts`           records checked and packed into messages
- `outbox`         messages that are sent again until they are answered
- `inbox`          what was delivered and nobody has taken yet
"""
