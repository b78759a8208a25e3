"""Trackers: services and file formats to which a run's metrics go beside `metrics.jsonl`. One module each.

- `tracker`          protocol of a tracker, and the messages to and from its process
- `kinds`            table of all kinds of trackers
- `sample_table`     the answers of a step that a tracker shows
- `swanlab`, `tensorboard`, `trackio`, `wandb`   one tracker each; its package is imported when it starts
- `tracker_process`  process of one tracker: the tracker may hang, die or start threads there
- `own_secrets`      keys and passwords of the user, kept out of logs and trackers
"""
