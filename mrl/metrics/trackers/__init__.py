"""Trackers: where a run's metrics go beside `metrics.jsonl`. One file each; `kinds` names them all.

- `tracker`          what a tracker is given, and what it does with it
- `kinds`            the one table of kinds
- `sample_table`     which answers of a step a tracker shows
- `swanlab`, `tensorboard`, `trackio`, `wandb`   one tracker each; its package is imported when it starts
- `tracker_process`  the process in which one tracker lives: it may hang, die or start threads there
- `own_secrets`      keys and passwords of the user, kept out of logs and of what trackers are told
"""
