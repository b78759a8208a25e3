"""A checkpoint of a run's policy as a folder that transformers loads."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.policy_tables import PolicyTable
from mrl.config.run_folder import RunFolder
from mrl.errors import CheckpointError, RunFolderError

if TYPE_CHECKING:
    from mrl.weights.checkpoint_store import Checkpoint

CARD = "README.md"
ADAPTER = "adapter"
"""Folder of the adapters beside the merged weights."""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".gguf", ".tflite")
"""Ends of the names of files with weights in other formats, or with a trainer's state: they hold the earlier model."""


def step_of(found: list[int], wanted: int | None, where: Path) -> int:
    """Return the wanted step among those with checkpoints, or the newest. Raises RunFolderError where there is none."""
    if not found:
        raise RunFolderError("no checkpoint", where=str(where), cure="let the run come to its first checkpoint")
    if wanted is not None and wanted not in found:
        raise RunFolderError("no checkpoint of this step", where=str(where), got=wanted, wanted=f"one of {found}")
    return found[-1] if wanted is None else wanted


def sound_checkpoint(folder: RunFolder, policy: str, step: int) -> "Checkpoint":
    """Return the checkpoint of one policy at one step. Raises CheckpointError where it is damaged."""
    from mrl.weights.checkpoint_store import CheckpointStore  # imports torch

    store = CheckpointStore(folder.checkpoints(policy), policy)
    if problem := store.problem(step):
        raise CheckpointError(problem)
    return store.open(step)


def write_folder(part: Path, table: PolicyTable, checkpoint: "Checkpoint") -> None:
    """Fill `part` with the checkpoint's weights, and configuration, tokenizer and chat template of the policy's model.

    For a policy that trains adapters, write the merged weights, and in `adapter/` the adapters alone.
    """
    _write_weights(part, table, checkpoint)
    for file in Path(table.model).iterdir():
        if file.is_file() and "safetensors" not in file.name and file.name != CARD and not _has_weights(file):
            shutil.copyfile(file, part / file.name)  # without file modes: the model's files may be read-only


def _has_weights(file: Path) -> bool:
    """Whether a file holds weights in another format, or is an index of such files."""
    return file.name.removesuffix(".index.json").endswith(OTHER_WEIGHTS)


def _write_weights(folder: Path, table: PolicyTable, checkpoint: "Checkpoint") -> None:
    from mrl.models.load_policy import hollow_policy, load_policy
    from mrl.models.lora import add_adapters, write_adapters
    from mrl.models.parameters import released, trained_weights, whole_weights
    from mrl.weights.publish import write_weights
    from mrl.weights.training_state import restore_weights, saved_weights

    lora = table.learner.lora
    if lora is None:
        write_weights(folder, released(hollow_policy(Path(table.model)), saved_weights(checkpoint)))
        return
    model = load_policy(Path(table.model))
    add_adapters(model, lora, seed=0)
    restore_weights(model, checkpoint)
    write_weights(folder, whole_weights(model))
    write_adapters(folder / ADAPTER, lora, trained_weights(model), table.source or table.model)
