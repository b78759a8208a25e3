"""The learner: batches of scored groups in, new versions out.

- `training_loop`          main loop of a learner
- `ledger`                 which worker samples which prompt, within the staleness bound; no socket or clock
- `intake`                 the thread that answers workers from the ledger
- `worker_activity`        progress of the workers, and the bounds of waits for them
- `verifier_limit`         limit of the answers on which verifiers fail
- `prompts`                curriculum, continuations of peers' episodes, reuse of groups, adaptive pace
- `held_out_ledger`        which worker answers which held-out prompt; no socket or clock
- `evaluations`            which versions are evaluated, and the reports of results
- `asynchronous_batching`  batches of own groups, each policy at its own pace
- `synchronous_batching`   batches of own groups, all policies step by step together
- `batches`                own groups and peers' records become the order of a step
- `step_order`             the order of a step, which all ranks train on
- `packing`                training examples -> packed tensors, the only bridge from records to tensors
- `ranks`                  the process group of one policy: meeting, sums, and a watch for stalls
- `sharding`               parameters whole on every rank, or sharded over the ranks
- `activation_offload`     inputs of checkpointed blocks in main memory
- `forward`                log-probabilities and entropies of a packed batch's answer tokens
- `loss`                   the components' terms on these, divided by denominators known before
- `step`                   one optimizer update over packed batches
- `piecewise_adamw`        AdamW with moments in main memory, or in 16 bits (`stochastic_rounding`)
- `trainer`                all updates of a step, with metrics (`token_diagnostics`, `peer_logprobs`, `step_timing`)
- `references`             canaries: the learner's own scores that go with a version
- `training_dumps`         files for people: answers of every step, and rows of skipped updates

Shapes: N packed sequences of L tokens, T answer tokens of all rows of a batch, R rows.
"""
