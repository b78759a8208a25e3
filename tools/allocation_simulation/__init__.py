"""Parts of `tools/simulate_allocation.py`.

- `settings`    policies, scenarios and random instances: every constant of the simulated world
- `engine`      a replica: processor sharing with a latency line, a key-value cache and pauses
- `learner`     a policy: gate, window, buffer, steps; everything between a prompt and a version
- `world`       units, moves, failures and accounting, in simulated time
- `rules`       what decides: the controller of `mrl.allocation`, and what it is compared with
- `bound`       the clairvoyant optimum, by linear programmes; shares no code with the controller
- `outcomes`    trials over seeds, and what they say
"""
