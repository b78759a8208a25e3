"""What is done before a run starts, or beside it: checked, made, measured, compared.

- `preflight`            everything that can be found wrong before a process is started or a file is written
  (`model_folder`, `prompt_fit`, `learning_values`, `tracker_checks`), and `completion` the values of keys left out
- `hub_models`           models by name: pinned, fetched, found; `hub` asks and fetches, one model at a time
- `checkpoint_folder`    a checkpoint as a folder that transformers loads; `checkpoint_room` whether the disk holds all
- `prompt_days`          the day that chat templates print, the same for a whole run
- `hub_data`             data sets by name, in the same way
- `made_policies`        small local policies, made once and cached; `model_bytes` how large others are
- `pair_cards`           what the tokenizers of a run's policies make of a log-ratio, measured beside the run
- `engine_examination`   what one engine does on this machine, held against a plain forward
- `comparison_plan`, `comparison_training`   the runs of a comparison, and their training
"""
