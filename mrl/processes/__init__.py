"""Processes of a run, one module each. Every such module opens with what its process owns, speaks and waits for.

The processes are `supervisor` (on the first host), `join` (the supervisor of every other host), `learner`, `worker`,
`exchange`, `allocator` and `gateway`. `engines` builds the engine that a policy's table names; `trackers` feeds metrics
to trackers such as TensorBoard. `role_runtime` holds the outer edge that all processes share: signals, logs, telemetry,
exit codes. `planning` decides which processes there are, and where; `preparation` holds checks and downloads before a
run; `evaluation` measures policies outside of a run and serves old checkpoints.
"""
