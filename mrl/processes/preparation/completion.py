"""Fill in keys that a configuration left out and that follow from its models and its data."""

from pathlib import Path

from mrl.config.defaults import Choice, Resolved, by_data, by_groups, by_model, by_size
from mrl.config.schema import RunConfig
from mrl.config.task_tables import PoolTable
from mrl.errors import UserError
from mrl.processes.preparation.model_bytes import parameters, weights_bytes
from mrl.processes.preparation.model_folder import context_tokens


def complete(config: RunConfig) -> Resolved:
    """Return `config` with left-out keys filled in from its models and data, and the list of these choices.

    Missing or damaged models and data fill in nothing: the check before a run refuses them.
    """
    choices: list[Choice] = []
    for chosen in (
        lambda config: by_size(config, weights_bytes(config)),
        lambda config: by_model(config, parameters(config), _contexts(config)),
        by_groups,
        lambda config: by_data(config, _prompts_held(config)),
    ):
        resolved = chosen(config)
        config, choices = resolved.config, [*choices, *resolved.choices]
    return Resolved(config, tuple(choices))


def _contexts(config: RunConfig) -> dict[str, int]:
    found = {}
    for name, policy in config.policies.items():
        if policy.model and (Path(policy.model) / "config.json").is_file():
            try:
                found[name] = context_tokens(Path(policy.model))
            except UserError:
                continue
    return found


def _prompts_held(config: RunConfig) -> dict[str, int]:
    """Return key of the pool -> number of distinct prompts, where a task has fewer than its share.

    Returns {} unless all tasks read files.
    """
    from mrl.tasks.pool import spread
    from mrl.tasks.source import Part
    from mrl.tasks.sources import open_source
    from mrl.tasks.split import distinct_items, part_of

    parts_of: dict[str, Part] = {"train_prompts": "train", "held_out_prompts": "held_out"}
    keys = {key: part for key, part in parts_of.items() if key not in config.pool.model_fields_set}
    if not keys or any(table.source not in ("jsonl", "math", "benchmark") for table in config.tasks.values()):
        return {}
    held: dict[str, list[int]] = {key: [] for key in keys}
    for task, table in config.tasks.items():
        try:
            source = open_source(task, table, seed=config.pool.seed)
            parts = [part_of(item) for item in distinct_items(source, table, 0)]
        except UserError:
            return {}
        for key, part in keys.items():
            held[key].append(parts.count(part))
    # Where a task has fewer prompts than its share, all tasks give all that they have.
    weights = {"train_prompts": [table.weight for table in config.tasks.values()]}
    found = {}
    for key, counts in held.items():
        shares = spread(PoolTable.model_fields[key].default, weights.get(key, [1.0] * len(counts)))
        if any(count < share for count, share in zip(counts, shares, strict=True)):
            found[key] = sum(count for count, share in zip(counts, shares, strict=True) if share)
    return found
