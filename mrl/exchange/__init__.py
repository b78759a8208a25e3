"""The exchange (SEE in the paper, arXiv 2605.07244): the daemon through which policies pass each other experience.

The protocol is `mrl.records.exchange_messages`. Learners and workers speak to the daemon through `client`, which blocks
only in calls that ask for it, and with a bound. `store` and docs/exchange.md describe the file that holds all records.

Invariants:
- What was acknowledged is committed. Afterwards a record is found, or it was evicted and counted.
- Nothing older than allowed is stored or delivered. Age counts in versions of the record's source, never by a clock.
- Memory, file, queues and tables are bounded. What is sent is bounded by what the other side has acknowledged.
- A client speaks for the policy of its key and for no other.
- A late or missing exchange costs peer data and nothing else. The exception is a synchronous run, whose policies wait
  for each other: it ends when a barrier's time runs out.
- No torch, no transformers.

A record is encoded once by its source, and decoded by each receiver, which checks every field. The daemon reads the
record's tags and passes the record on as it came.

The records held:
- `limits`         every bound, and that they fit together
- `record_index`   the newest records per type, policy and prompt, within a byte budget
- `versions`       newest version and resume points of every policy: the age of a record, and whether it is void
- `record_intake`  judgement of records that clients put, and those on their way to the file
- `transaction`    changes of the file that are committed together
- `replay`         records of a run that ended, taken over when a daemon begins
- `store`, `writer`  the SQLite file, and the thread that commits; `contents` is what a new daemon finds in the file

Deliveries:
- `watches`        answers to questions about prompts, clients that wait for later records, and counts of the traffic
- `subscriptions`  requests to a policy, each handed to one of its clients at a time
- `barriers`       barriers at which the policies of a synchronous run wait for each other
- `sessions`       the daemon's memory of one client: deliveries that it has not acknowledged
- `core`           every decision of the daemon, with no socket, clock or file in it
- `daemon`         core, file and server socket put together
- `exchange_stats`, `metrics`  the daemon's account of itself, for `mrl inspect` and for Prometheus

The client's side:
- `client`         the calls of learners and workers
- `publisher`      records gathered into Puts
- `client_fetches` Fetches of prompts, and watches
- `inbox`          records that came and were not taken yet
- `archive`        reader of the file without a daemon
"""
