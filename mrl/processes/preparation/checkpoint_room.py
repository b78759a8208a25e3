"""Check, before a run begins, whether the disk of its folder has room for all its checkpoints."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from mrl.config.policy_tables import ELEMENT_BYTES, LearnerTable
from mrl.config.run_folder import RunFolder, run_folder_of
from mrl.config.schema import RunConfig

GIB = 1024**3
MOMENTS = 2
"""Numbers that AdamW keeps for each parameter; a checkpoint holds them and the parameter."""


def room_notes(config: RunConfig, parameters: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning where the checkpoints will not all have room. `parameters`: policy -> number, where known.

    A checkpoint is written before the oldest is deleted. Existing checkpoints need no more room. Policies that train
    adapters are left out: their checkpoints are small.
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
            f"checkpoints may need up to {sum(wanted.values()) / GIB:.0f} GiB in {folder.path} ({each}), but only"
            f" {free / GIB:.0f} GiB are free: the run will end when the disk is full. Lower"
            " policies.X.learner.keep_checkpoints, or set another run.folder"
        )


def checkpoint_bytes(table: LearnerTable, parameters: int) -> int:
    """Return the bytes of one checkpoint of a policy that trains all its weights."""
    return parameters * (ELEMENT_BYTES[table.parameter_dtype] + MOMENTS * ELEMENT_BYTES[table.optimizer_dtype])


def num_at_once(config: RunConfig, name: str) -> int:
    """Return the most checkpoints of a policy on the disk at any time: those kept, and the one being written."""
    from mrl.weights.checkpoint_store import MIN_KEPT

    table, steps = config.policies[name].learner, config.run.steps
    kept = max(table.keep_checkpoints, MIN_KEPT) if config.run.sync else table.keep_checkpoints
    num_written = -(-steps // table.checkpoint_every) if table.checkpoint_every else 1
    return min(kept + 1, num_written)


def _existing(folder: RunFolder) -> Path:
    """Return the run folder, or the nearest folder above it that exists."""
    return next(path for path in (folder.path, *folder.path.parents) if os.path.exists(path))


def _bytes_in(checkpoints: Path) -> int:
    found = 0
    for file in checkpoints.glob("step_*/*"):
        with suppress(FileNotFoundError):  # a running run has just deleted its oldest checkpoint
            found += file.stat().st_size
    return found
