"""Keys that a resumed run must share with its earlier attempts: all that a checkpoint's meaning depends on.

They are the tasks in their order, the prompt pool, the run's seed and mode, the sharing regime, and the identity of
each policy. Length, learning rates, evaluation, machine and supervision may change between two attempts.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mrl.config.schema import RunConfig
from mrl.errors import RunFolderError


def check_same_meaning(before: RunConfig, after: RunConfig, *, where: str) -> None:
    """Raises RunFolderError naming the first key whose value would change what the run's checkpoints mean."""
    found = first_difference(_meaning(before), _meaning(after), ())
    if found is None:
        return
    path, has, given = found
    raise RunFolderError(
        f"{'.'.join(path)}: differs from the value in the run",
        where=where,
        got=given,
        wanted=repr(has) if isinstance(has, str) and path[-1] in ("regime", "model", "dataset") else str(has),
        cure="resume with the same value, or choose another --run.name",
    )


def check_steps_left(saved: Mapping[str, Collection[int]], config: RunConfig, *, where: str) -> None:
    """Raises RunFolderError when a learner would go on from a step that lies beyond the end of the run.

    `saved` holds the steps of every learner's checkpoints. Policies that step together go on from their newest common
    step, all others from their own newest.
    """
    newest = {policy: max(steps) for policy, steps in saved.items() if steps}
    if config.run.sync and saved:
        common = set.intersection(*map(set, saved.values()))
        newest = dict.fromkeys(saved, max(common)) if common else {}
    for policy, step in newest.items():
        if step > config.run.steps:
            raise RunFolderError(
                f"run.steps: {policy} already has a checkpoint of step {step}",
                where=where,
                got=config.run.steps,
                wanted=f">= {step}",
                cure=f"set --run.steps {step} or more, or choose another --run.name",
            )


def check_from_start(names: Collection[str], config: RunConfig, *, resume: bool, where: str) -> None:
    """Raises RunFolderError unless these policies can begin anew in a run that is resumed."""
    option = "--policy-from-start"
    unknown = [name for name in names if name not in config.learning]
    if names and not resume:
        raise RunFolderError(f"{option} requires --resume", where=where, cure="add --resume")
    if unknown:
        wanted = f"one of {', '.join(config.learning)}"
        raise RunFolderError(f"{option}: not a policy that learns", where=where, got=unknown[0], wanted=wanted)
    if names and config.run.sync and set(names) != set(config.learning):
        cure = f"name all of them: {', '.join(config.learning)}"
        raise RunFolderError(
            f"{option}: policies of a synchronous run (run.sync) can only start over together", where=where, cure=cure
        )


def _meaning(config: RunConfig) -> dict[str, Any]:
    tables = config.model_dump(mode="json")
    return {
        "policies": {name: _identity(policy) for name, policy in sorted(tables["policies"].items())},
        "tasks": tables["tasks"],
        "pool": tables["pool"],
        "run": {key: tables["run"][key] for key in ("seed", "sync")},
        "sharing": {"regime": tables["sharing"].get("regime")},
    }


def _identity(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that make a policy what it is.

    A made policy is its recipe, a model of the hub its commit, wherever the files lie; any other is its folder. The
    policy's prompt table belongs to it.
    """
    folder = Path(policy["model"]).absolute()
    is_pinned = policy["source"].endswith(f"@{folder.name}")
    model = "" if policy["make"] is not None else policy["source"] if is_pinned else str(folder)
    asked = {"prompt": policy["prompt"]}
    return {"make": policy["make"], "frozen": policy["frozen"], "model": model} | asked


def first_difference(before: Any, after: Any, path: tuple[str, ...]) -> tuple[tuple[str, ...], Any, Any] | None:
    """Return the first difference as (key, value of the run, value given), or None.

    The order of tasks counts: it decides which prompts stand where.
    """
    if not isinstance(before, dict) or not isinstance(after, dict):
        return None if before == after else (path, before, after)
    if list(before) != list(after) and (path == ("tasks",) or before != after):
        names = path in (("tasks",), ("policies",))
        return (path, ", ".join(before), ", ".join(after)) if names else (path, before, after)
    for key in before:
        found = first_difference(before[key], after.get(key), (*path, key))
        if found is not None:
            return found
    return None
