"""Metrics: emission, names and storage of the numbers, heartbeats, samples and spans of every role.

- `names`               the one table of metric names with units
- `telemetry`           interface of a role; records go to a sink that the role provides
- `time_spans`  activities and waits of a role, as few spans of time
- `unconfirmed_metrics` metrics of a role without confirmation; a role that ends leaves them in a file
- `jsonl`               `metrics.jsonl` and `rollouts/step_N/<policy>.jsonl`, written by the supervisor alone
- `rollout_files` `rollouts/step_N/<policy>.jsonl.gz`, all answers that were trained on, written by the learner
- `timeline`            `timeline.jsonl`, the spans of all roles, bounded in bytes, written by the supervisor
- `evaluation_results` the result of an evaluation, as metrics, samples and a file
- `pass_at_k`           estimates from several answers to every prompt
- `host_load`, `gpu_load`  CPU, memory, disk and GPUs of a host, measured by its supervisor
- `trackers`            SwanLab, TensorBoard, trackio, wandb: each in a process of its own, fed by the supervisor
- `logging`             structlog for every process

A name outside the table is never emitted. No call of a role into this room blocks or uses a socket, except that
`UnconfirmedMetrics.settle` waits at the end of a role.
"""
