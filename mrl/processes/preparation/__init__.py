"""Work before a run starts, or beside it: checks, downloads, made policies, measurements, comparisons.

- `preflight`            all checks before a process of the run is started or a file is written (`model_folder`,
  `prompt_fit`, `learning_values`, `tracker_checks`); `completion` fills in keys that were left out
- `hub_models`           models by name: pinned, fetched, found; `hub` asks the hub and fetches files
- `checkpoint_folder`    a checkpoint as a folder that transformers loads; `checkpoint_room` whether the disk holds all
- `prompt_days`          the day that chat templates print, the same for a whole run
- `hub_data`             data sets by name, in the same way
- `made_policies`        small local policies, made once and cached; `model_bytes` the sizes of other models
- `pair_cards`           the error of a log-ratio that two policies' tokenizers alone cause, measured beside the run
- `replayed_run`         checks of the ended run whose records a run begins with
- `starting_config`      a commented configuration for the user's own models and data
- `engine_examination`   one engine on this machine, compared with a plain forward
- `comparison_plan`, `comparison_training`   the runs of a comparison, and their training; `tuning` before them
"""
