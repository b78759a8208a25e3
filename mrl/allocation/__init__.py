"""Allocation: who may run how many requests at once (MWRA in the paper).

A pure core (`core`) answers lease requests; `ledger` is its record of who may be using what. A worker keeps a
`lease.LeaseHolder`, a learner a `report.ReportSender`.

Shares are decided in steps that are pure, and the same in the allocator and in the simulator:
- `meter`     counters of engines and learner -> demand, supply, silence of a policy; `latency_line` what a full engine
  would make, `engine_use` the counters of engines on units
- `worth`     what a share of units is worth: the objective, with the price of switching inside
- `solver`    the exact split of one type of units; `exchange_search` where there are several; `shares` in proportion
- `decision`  state and readings -> new shares and the record why: floors, ageing, dwell, bucket, urgency
- `unmeasured` a fair part for policies without a known demand; `window` how many groups a policy may have in flight
- `slot_shares` all of it for slots of running engines

Protocol: a worker asks about once a second and says which lease it acts under; the answer is its lease: slots, epoch,
ttl. A lease that changes gets a new epoch, larger than every one before. A learner reports its totals once a step, and
gives signs of life while it waits and trains.

Invariants:
- What holders may be using never sums to more than the slots: a growing lease waits for the shrinking ones, and a
  shrunk lease counts in full until its holder acts under it or was silent for the ttl.
- Every policy with a live holder and a live learner has its floor; slots are free only where no policy can use them, or
  where they are fewer than a group.
- Only the allocator acts on expiry. While it is away holders keep what they have; when it is back it first listens for
  one ttl, so that it knows what is in use.
"""
