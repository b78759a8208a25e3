"""Exchange (SEE in the paper, arXiv 2605.07244): the daemon through which policies pass each other their experience.

Protocol: `mrl.records.exchange_messages`. Learners and workers speak to it through `client`, which blocks them only
where they ask for it, and with a bound.

Invariants: what was acknowledged is on the log, and is delivered, or evicted and counted; nothing is stored or
delivered that is older than allowed, counted in versions of its source and never by a clock; memory, log, queues and
tables are bounded, and what is sent is bounded by what the other side has acknowledged; a client speaks for the policy
of its key and for no other; a late or missing exchange costs peer data and nothing else (a synchronous run, which is
made of waiting for each other, ends when a barrier's time runs out). No torch, no transformers.

Records travel in packs of equal tags (source, type, versions, task). The daemon stores and passes on a pack unread and
whole, until somebody asks for records of its type by prompt or id; from then on it reads the tags of each. A record is
encoded once by its source, and decoded by each receiver, which checks every field. On one host packs go by file: from
the client's spool to the daemon, from the daemon's log to the readers of streams.

What is held, and must be again after a restart:
- `memory`         everything that the log rebuilds, and the rules by which it changes
- `shelf`          packs, and per type, policy and prompt the newest records, within a byte budget
- `entry`, `arrival_order`  a pack or a record, and the order in which they came
- `kinds`          how many are kept of every type
- `versions`       newest version and resume points of every policy: the age of a record, and whether it is void
- `intake`         which records are taken, and which are on their way to the log
- `journal`        what stands on the log
- `postings`       what is on its way there, and where it comes to stand
- `log`            the segments on the disk, and the thread that writes them

Who gets what:
- `streams`        everything of some types, sources and tasks, in order, each record once per reader
- `matching`       what answers a question about a prompt, and whose watch takes a newcomer
- `watches`        who waits for which prompt
- `subscriptions`  requests to a policy, each handed to one of its clients at a time
- `deliveries`     from entries to messages of bounded size
- `parking`        Puts that wait for room
- `barriers`       where policies in step wait for each other
- `sessions`       what the daemon remembers about one client
- `flows`          what went from which policy to which
- `core`           the conversation: every decision of the daemon, with no socket, clock or file in it
- `outside`        what the core needs of the world
- `daemon`         core, log and server socket put together

What a person sees of it:
- `inspection`     one record, and for whom something is open
- `exposition`     its account as Prometheus metrics and as a state of health, for another thread
- `pages`          the HTTP server that shows these, bounded against slow and hostile readers

The other end of the conversation:
- `client`         what learners and workers call, over a `link`
- `publisher`      records gathered into Puts, in `packing`
- `questions`      what is asked of prompts
- `shards`         which of several daemons a prompt lives on, and their clients as one
- `outbox`         messages that are sent again until they are answered, within the daemon's window
- `arrivals`       what comes, decoded and sorted out: the `inbox` that nobody has emptied yet, the `reader` of a stream
- `shared_files`   the `spool` and the daemon's log, on its host
"""
