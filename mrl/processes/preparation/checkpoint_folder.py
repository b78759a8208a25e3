"""A checkpoint of a run's policy as a folder that transformers loads."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config.policy_tables import PolicyTable
from mrl.config.run_folder import RunFolder
from mrl.errors import CheckpointError, ModelFolderError, RunFolderError
from mrl.models.tensor_header import read_header
from mrl.processes.preparation.model_folder import weight_files

if TYPE_CHECKING:
    from mrl.weights.checkpoint_store import Checkpoint

CARD = "README.md"
ADAPTER = "adapter"
"""Folder of the adapters beside the merged weights."""
AS_MODEL = "model"
"""In place of a dtype: each tensor keeps its dtype in the folder that the policy was trained from."""
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Dtypes of exported weights: torch's name -> that of safetensors."""
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of config.json for the dtype; older programs read the second."""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".gguf", ".tflite")
"""Ends of the names of files with weights in other formats, or with a trainer's state: they hold the earlier model."""


def step_of(found: list[int], wanted: int | None, where: Path) -> int:
    """Return the wanted step among those with checkpoints, or the newest. Raises RunFolderError where there is none."""
    if not found:
        raise RunFolderError(
            "no checkpoint found", where=str(where), cure="wait until the run has saved its first checkpoint"
        )
    if wanted is not None and wanted not in found:
        raise RunFolderError("no checkpoint for this step", where=str(where), got=wanted, wanted=f"one of {found}")
    return found[-1] if wanted is None else wanted


def sound_checkpoint(folder: RunFolder, policy: str, step: int) -> "Checkpoint":
    """Return the checkpoint of one policy at one step. Raises CheckpointError where it is damaged."""
    from mrl.weights.checkpoint_store import CheckpointStore  # imports torch

    store = CheckpointStore(folder.checkpoints(policy), policy)
    if problem := store.problem(step):
        raise CheckpointError(problem)
    return store.open(step)


def write_folder(part: Path, table: PolicyTable, checkpoint: "Checkpoint", dtype: str = "") -> None:
    """Fill `part` with the checkpoint's weights, and configuration, tokenizer and chat template of the policy's model.

    For a policy that trains adapters, write the merged weights, and in `adapter/` the adapters alone. All weights but
    those of `adapter/` are in `dtype`, one of DTYPES or AS_MODEL; "" leaves them as the checkpoint has them.
    """
    _write_weights(part, table, checkpoint, dtype)
    for file in Path(table.model).iterdir():
        if file.is_file() and "safetensors" not in file.name and file.name != CARD and not _has_weights(file):
            shutil.copyfile(file, part / file.name)  # without file modes: the model's files may be read-only
    if dtype in DTYPES:
        _tell_dtype(part / "config.json", dtype)


def dtypes_in(folder: Path) -> dict[str, str]:
    """Return tensor -> its dtype in a model folder, for dtypes of DTYPES. Raises ModelFolderError."""
    names = {stored: name for name, stored in DTYPES.items()}
    try:
        headers = [read_header(file) for file in weight_files(folder, str(folder), "")]
    except (OSError, ValueError) as error:  # of a missing file, too
        what, got = "cannot read the dtypes of the model's weights", " ".join(str(error).split())
        cure = "restore the model folder, or use --dtype float32, which does not need them"
        raise ModelFolderError(what, where=str(folder), got=got, cure=cure) from error
    return {name: names[one] for header in headers for name, one in header.dtypes.items() if one in names}


def _has_weights(file: Path) -> bool:
    """Whether a file holds weights in another format, or is an index of such files."""
    return file.name.removesuffix(".index.json").endswith(OTHER_WEIGHTS)


def _write_weights(folder: Path, table: PolicyTable, checkpoint: "Checkpoint", dtype: str) -> None:
    from mrl.models.load_policy import load_policy, policy_without_values
    from mrl.models.lora import add_adapters, write_adapters
    from mrl.models.parameters import in_dtypes, released, trained_weights, whole_weights
    from mrl.weights.publish import write_weights
    from mrl.weights.training_state import restore_weights, saved_weights

    model_folder, lora = Path(table.model), table.learner.lora
    stored = dtypes_in(model_folder) if dtype == AS_MODEL else {}
    others = dtype if dtype in DTYPES else ""
    if stored:  # tensors that the folder does not name get its most common dtype
        others = Counter(stored.values()).most_common(1)[0][0]
    if lora is None:
        weights = released(policy_without_values(model_folder), saved_weights(checkpoint))
        write_weights(folder, in_dtypes(weights, stored, others))
        return
    model = load_policy(model_folder)
    add_adapters(model, lora, seed=0)
    restore_weights(model, checkpoint)
    write_weights(folder, in_dtypes(whole_weights(model), stored, others))
    write_adapters(folder / ADAPTER, lora, trained_weights(model), table.source or table.model)


def _tell_dtype(config_file: Path, dtype: str) -> None:
    """Write `dtype` into a config.json, for the model and for each part of it whose dtype the file names."""
    described = json.loads(config_file.read_text(encoding="utf-8"))
    if not any(key in described for key in DTYPE_KEYS):
        described["dtype"] = dtype
    config_file.write_text(json.dumps(_saying(described, dtype), indent=2, ensure_ascii=False), encoding="utf-8")


def _saying(described: dict[str, Any], dtype: str) -> dict[str, Any]:
    parts = {key: _saying(value, dtype) for key, value in described.items() if isinstance(value, dict)}
    return described | parts | {key: dtype for key in DTYPE_KEYS if described.get(key)}
