"""Allocation: who may run how many requests at once (MWRA in the paper).

A pure core (`core`) answers lease requests and decides shares; `shares` is its rule, `meter` its measurement, `ledger`
its record of who may be using what. A worker keeps a `lease.LeaseHolder`, a learner a `report.ReportSender`.

Protocol: a worker asks about once a second and says which lease it acts under; the answer is its lease: slots, epoch,
ttl. A lease that changes gets a new epoch, larger than every one before. A learner reports its totals once a step.

Invariants:
- What holders may be using never sums to more than the slots: a growing lease waits for the shrinking ones, and a
  shrunk lease counts in full until its holder acts under it or was silent for the ttl.
- Targets sum to the slots, and every policy with a live holder has its floor.
- Only the allocator acts on expiry. While it is away holders keep what they have; when it is back it first listens for
  one ttl, so that it knows what is in use.
"""
