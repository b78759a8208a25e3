"""Metrics: how numbers, heartbeats and samples leave a role, and how they are stored and named.

- `names`     the one table of metric names with units
- `telemetry` the interface of a role; records go to a sink that the role provides
- `time_spans`  activities and waits of a role, as few spans of time
- `jsonl`     `metrics.jsonl` and `rollouts/step_N/<policy>.jsonl`, written by the supervisor alone
- `rollout_files` `rollouts/step_N/<policy>.jsonl.gz`, all answers that were trained on, written by the learner
- `timeline`  `timeline.jsonl`, the spans of all roles, bounded in bytes, written by the supervisor
- `evaluation_results` the result of an evaluation, as metrics, samples and a file
- `host_load`, `gpu_load`  CPU, memory, disk and GPUs of a host, measured by its supervisor
- `trackers`  SwanLab, TensorBoard, trackio, wandb: each in a process of its own, fed by the supervisor
- `logging`   structlog for every process

A name outside the table is never emitted. No function of this room blocks or uses a socket.
"""
