"""Processes of a run: one file each, which opens with what it owns, speaks, waits for, and what happens if it dies.

The processes are `supervisor` (of the first host) and `join` (of another one), `learner`, `worker`, `exchange` and
`allocator`. `engines` builds the engine that a policy's table names, `trackers` feeds what gets the metrics besides
the run's own files. `wiring` holds what every process does at its outer edge: signals, logs, telemetry, exit codes.
`planning` decides which processes there are, and where; `preparation` is what is done before they start.
"""
