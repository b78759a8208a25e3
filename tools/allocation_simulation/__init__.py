"""Parts of `tools/simulate_allocation.py`, which runs the allocation controller in simulated time.

- `settings`    policies, scenarios and random instances: every constant of the simulated world
- `engine`      a replica: processor sharing with a latency line, a key-value cache and pauses
- `learner`     a policy: gate, window, buffer, steps; everything between a prompt and a version
- `world`       units, moves, failures and accounting, in simulated time
- `large`       the same world for thousands of units
- `placement`   the units that each replica gets
- `rules`       the allocation rule under test: the controller of `mrl.allocation`
- `baselines`   fixed splits of the units, with which the controller is compared
- `bound`       the clairvoyant optimum, by linear programmes; shares no code with the controller
- `outcomes`    trials over seeds, and their averages
"""
