"""Choice of the prompts that a policy samples next, and of the groups that it trains on again.

- `curriculum`        which visits of the prompt order a policy skips
- `continuations`     states of peers' episodes from which groups are sampled
- `admission_window`  how many groups are running and ready at an adaptive pace
- `reuse`             which earlier own groups a step has in place of fresh ones
"""
