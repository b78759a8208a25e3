"""Metrics: how numbers, heartbeats and samples leave a role, and how they are stored and named.

- `names`     the one table of metric names with units
- `telemetry` what a role calls; records go to a sink that the role gives
- `time_spans`  what a role did and waited for, as few spans of time
- `jsonl`     `metrics.jsonl` and `rollouts/step_N/<policy>.jsonl`, written by the supervisor alone
- `residuals` `residuals/<policy>.jsonl`, bounded in bytes, likewise
- `timeline`  `timeline.jsonl`, the spans of all roles, bounded in bytes, likewise
- `evaluation_results` what an evaluation found, as metrics, samples and a file
- `logging`   structlog for every process

A name that is not in the table is never emitted. Nothing here blocks, and nothing here knows a socket.
"""
