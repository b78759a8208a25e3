"""Allocation: how much rollout capacity each policy has (MWRA in the paper), as slots of engines or as whole units.

Leases, which say what a worker may use now. Cores are pure: a message and the time in, answers out.
- `slot_core`        leases of slots: answers requests of workers; `slot_leases` keeps the slots that each may be using
- `unit_core`        leases of whole units; `unit_leases` keeps their states, `node_guard` is the host's side
- `lease`            a worker's side of its lease; `learner_reports` a learner's side
- `device_turn`      turns on devices that learners and engines of one host share: leases that the kernel ends
- `allocation_limits` fixed bounds and time constants

Shares, which say what a policy should have. Every step is pure, and the same in the allocator and in the simulator.
- `meter`            counters of engines and learner -> demand, supply, silence of a policy; `engine_meter` speeds of
  engines by type of unit, `engine_totals` the work of engines on units
- `objective`        the worth of a share of units, with the price of switching inside; also the numbers of the rule
- `solver`           the exact split of one type of units; `typed_split` a search where there are several types
- `proportional`     splits without a demand; `replica_placement` and `floors` room for least shares on several types
- `decision`         state and readings -> new shares and a record of the reasons: floors, dwell, urgency
- `slot_controller`  meters and decisions of one pool of slots; `unit_controller` the same for units of every kind

Protocol: a worker asks about once a second and says which lease it acts under; the answer is its lease: slots, epoch,
ttl. A lease that changes gets a new epoch, larger than every epoch before. A learner reports its totals once a step,
and gives signs of life while it waits and trains.

Invariants:
- The slots that holders may be using never sum to more than there are. A growing lease waits for shrinking leases. A
  shrunk lease counts in full until its holder acts under it, or was silent for the ttl.
- A unit never has two owners: a lease ends by proof from the unit's node and by nothing else.
- Every policy with a live holder and a live learner has its floor. Slots are free only where no policy can use them, or
  where they are fewer than a group.
- Only the allocator acts on expiry. While it is away, holders keep their leases. A restarted allocator of slots first
  listens for one ttl, so that it knows which slots are in use.
"""
