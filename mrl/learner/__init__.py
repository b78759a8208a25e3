"""The learner: batches of scored groups in, new versions out.

- `ledger`    who samples which prompt, within the staleness budget; pure
- `intake`    the socket thread around the ledger
- `held_out_ledger` which evaluations are under way, and who answers their prompts; pure
- `evaluations` when a version is evaluated, and what is told of it
- `asynchronous_batching`  how the groups of a step come together, each policy at its own pace
- `synchronous_batching`  the same where all policies step together
- `batches`   groups and what peers say become the `step_order` that all ranks train on
- `packing`   training examples -> packed tensors, the only bridge from records to tensors
- `ranks`     the process group of one policy: how its ranks meet, what they sum, and who is awaited when they stall
- `sharding`  where parameters live: whole on every rank, or shared out over the ranks
- `forward`   log-probs and entropies of a packed batch's answer tokens
- `loss`      the components' terms on them, divided by what is known before
- `step`      one optimizer update over packed batches
- `trainer`   all updates of a step, and what they say (`token_diagnostics`, `peer_logprobs`, `step_timing`)
- `references` the scores of its own that go with a version, and those of the version before
- `prompts.curriculum` which visits of the prompt order a policy skips
- `prompts.reuse` which earlier own groups a step trains on again
- `kept_rows` samples of every step, and the rows of updates that were left out, to be looked at
- `training_loop`  the learner's life

Shapes: N packed sequences of L tokens, T answer tokens of all rows of a batch, R rows.
"""
