"""What a policy samples next, and what it trains on again.

- `curriculum`  which visits of the prompt order it skips
- `continuations` states of peers that it goes on from
- `admission_window` how much is in flight at an adaptive pace
- `reuse`       which earlier own groups a step has in place of fresh ones
"""
