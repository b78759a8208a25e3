"""Exchange (SEE in the paper, arXiv 2605.07244): the daemon through which policies pass each other their experience.

Protocol: `mrl.records.exchange_messages`. Learners and workers speak to it through `client`, which blocks them only
where they ask for it, and with a bound. The file in which everything stands: `store`, and docs/exchange.md.

Invariants: what was acknowledged is committed, and is found, or was evicted and counted; nothing is stored or delivered
that is older than allowed, counted in versions of its source and never by a clock; memory, file, queues and tables are
bounded, and what is sent is bounded by what the other side has acknowledged; a client speaks for the policy of its key
and for no other; a late or missing exchange costs peer data and nothing else (a synchronous run, which is made of
waiting for each other, ends when a barrier's time runs out). No torch, no transformers.

A record is encoded once by its source, and decoded by each receiver, which checks every field. The daemon reads its
tags and passes it on as it came.

What is held:
- `limits`         every bound, and that they fit together
- `record_index`   the newest records per type, policy and prompt, within a byte budget
- `versions`       newest version and resume points of every policy: the age of a record, and whether it is void
- `intake`         which records are taken, and which are on their way to the file
- `transaction`    what is committed at once
- `replay`         records of a run that ended, taken over when a daemon begins
- `store`, `writer`  the SQLite file, and the thread that commits; `contents` is what a new daemon finds in it

Who gets what:
- `watches`        what answers a question about a prompt, who waits for what comes later, and what went to whom
- `subscriptions`  requests to a policy, each handed to one of its clients at a time
- `barriers`       where policies in step wait for each other
- `sessions`       what was sent to one client and not acknowledged
- `core`           the conversation: every decision of the daemon, with no socket, clock or file in it
- `daemon`         core, file and server socket put together
- `account`, `metrics`  what a person sees of it, and Prometheus

The other end of the conversation:
- `client`         what learners and workers call
- `publisher`      records gathered into Puts
- `questions`      what is asked of prompts
- `inbox`          what came and nobody has taken yet
"""
