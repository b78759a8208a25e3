"""What a Hugging Face folder holds, compared with what an inference server has or says that it has."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrl.errors import WeightsError
from mrl.models.tensor_file import digest

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Modules that servers make of several, whose rows lie behind each other in this order."""
TIED_HEAD = "lm_head.weight"
VOCAB_ROWS = 64
"""Servers fill the rows of embeddings and heads up with zeros to a multiple of this."""


def check_same_tensors(folder: Path, like: Path) -> None:
    """Raises WeightsError unless `folder` has the tensors of `like` by name and shape; a tied head may be left out.

    A folder `like` that is not on this machine, or has no safetensors, tells nothing.
    """
    found, wanted = _shapes(folder), _shapes(like)
    if not wanted:
        return
    if _is_tied(like) and _is_tied(folder):
        found.pop(TIED_HEAD, None)
        wanted.pop(TIED_HEAD, None)
    if names := sorted(found.keys() ^ wanted.keys()):
        raise WeightsError(f"{folder}: not the tensors that the engine serves, {names[:5]} are in one of the two only")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise WeightsError(f"{folder}: {name} has shape {found[name]}, the engine serves {shape}")


def digests_held(folder: Path, sums: Mapping[str, str], dtype: str) -> dict[str, str]:
    """Name -> XXH3-128 of each tensor of `folder` of which the server holds every byte, its hash when it does not.

    `sums` are the server's: its name -> first 16 hex digits of SHA-256 of the tensor's bytes in `dtype`. What the
    server holds under a name that the folder does not explain is left out.
    """
    digests: dict[str, str] = {}
    with ExitStack() as stack:
        files = _open(stack, folder)
        for served, held in sums.items():
            parts = _parts(served)
            if not all(part in files for part in parts):
                continue
            rows = hashlib.sha256()
            for part in parts:
                tensor = files[part].get_tensor(part)
                digests[part] = digest(tensor)
                rounded = tensor.to(getattr(torch, dtype))
                rows.update(_bytes(rounded))
            filled_up = rows.copy()
            filled_up.update(bytes(-len(rounded) % VOCAB_ROWS * rounded[0].nbytes))
            if held not in {rows.hexdigest()[:16], filled_up.hexdigest()[:16]}:
                digests.update(dict.fromkeys(parts, f"sha256:{held}"))
    return digests


def _parts(served: str) -> list[str]:
    """The tensors of the folder whose rows a server's tensor is made of."""
    for fused, modules in FUSED.items():
        if f".{fused}." in served:
            return [served.replace(f".{fused}.", f".{module}.") for module in modules]
    return [served]


def _open(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """Name of each tensor -> the open file that holds it. Raises WeightsError."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path}: cannot be read: {error}") from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with ExitStack() as stack:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in _open(stack, folder).items()}


def _is_tied(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("tie_word_embeddings"))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
