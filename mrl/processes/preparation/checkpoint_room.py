"""Whether the disk of a run folder has room for all checkpoints of a run, which is told before it begins."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from mrl.config.policy_tables import LearnerTable
from mrl.config.run_folder import RunFolder, run_folder_of
from mrl.config.schema import RunConfig

GIB = 1024**3
MOMENTS = 2
"""Numbers that AdamW keeps beside each parameter; a checkpoint has all three."""
BYTES = {"float32": 4, "bfloat16": 2}


def room_notes(config: RunConfig, parameters: Mapping[str, int]) -> Iterator[str]:
    """A warning where checkpoints will not all have room; `parameters` of policies, as far as they are known.

    One is written before the oldest is deleted. Those that are there already take none. Adapters are small.
    """
    folder = run_folder_of(config)
    wanted = {
        name: num_at_once(config, name) * checkpoint_bytes(config.policies[name].learner, parameters.get(name, 0))
        for name in config.learning
        if config.policies[name].learner.lora is None
    }
    missing = sum(max(0, wanted[name] - _bytes_in(folder.checkpoints(name))) for name in wanted)
    free = shutil.disk_usage(_existing(folder)).free
    if missing > free:
        each = ", ".join(f"{name} {num_bytes / GIB:.0f}" for name, num_bytes in wanted.items())
        yield (
            f"checkpoints will take {sum(wanted.values()) / GIB:.0f} GiB of {folder.path} at most ({each}), and"
            f" {free / GIB:.0f} are free there: the run ends where no room is left. Fewer are kept by"
            " policies.X.learner.keep_checkpoints; or name another run.folder"
        )


def checkpoint_bytes(table: LearnerTable, parameters: int) -> int:
    """Length of one checkpoint of a policy that trains all its weights."""
    return parameters * (BYTES[table.parameter_dtype] + MOMENTS * BYTES[table.optimizer_dtype])


def num_at_once(config: RunConfig, name: str) -> int:
    """The most checkpoints of a policy that lie on the disk at any time: those kept, and the one that is written."""
    from mrl.weights.checkpoint_store import MIN_KEPT

    table, steps = config.policies[name].learner, config.run.steps
    kept = max(table.keep_checkpoints, MIN_KEPT) if config.run.sync else table.keep_checkpoints
    num_written = -(-steps // table.checkpoint_every) if table.checkpoint_every else 1
    return min(kept + 1, num_written)


def _existing(folder: RunFolder) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.path, *folder.path.parents) if os.path.exists(path))


def _bytes_in(checkpoints: Path) -> int:
    found = 0
    for file in checkpoints.glob("step_*/*"):
        with suppress(FileNotFoundError):  # a run that goes on has just deleted its oldest one
            found += file.stat().st_size
    return found
