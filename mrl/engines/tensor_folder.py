"""Tensors of a Hugging Face folder, compared with those that an inference server has, or with the hashes it reports."""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Container, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrl.errors import ModelFolderError, WeightsError
from mrl.models.skeleton import config_of_folder, ignored_weights
from mrl.models.tensor_file import digest
from mrl.models.tensor_header import files_of_weights

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Module that servers fuse -> modules of the folder whose rows follow each other in it, in this order."""
EXPERTS = {"w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")), "w2_weight": (("down_proj",), ("w2",))}
"""Parameter that servers make of all experts of a layer -> the modules of each expert in it, by either naming."""
TURNED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
"""Matrices that GPT-2 keeps transposed against a server's linear layers; other families have these names too."""
TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
VOCAB_ROWS = 64
"""Multiple to which servers pad the rows of embeddings and heads with zeros."""


def check_same_tensors(folder: Path, like: Path) -> None:
    """Raises WeightsError unless `folder` has the tensors of `like` by name and shape; a tied head may be left out.

    Tensors that transformers does not read of such a model, such as layers that predict further tokens, may be missing.
    Nothing is checked where `like` is not on this machine, or has no safetensors.
    """
    found, wanted = _shapes(folder), _shapes(like)
    if not wanted:
        return
    if _is_tied(like) and _is_tied(folder):
        found.pop(TIED_HEAD, None)
        wanted.pop(TIED_HEAD, None)
    if lacking := wanted.keys() - found.keys():
        unread = _unread(like, lacking)
        wanted = {name: shape for name, shape in wanted.items() if name not in unread}
    if names := sorted(found.keys() ^ wanted.keys()):
        raise WeightsError(
            f"{folder}: the tensors differ from those that the engine serves: only one side has {names[:5]}"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise WeightsError(f"{folder}: {name} has shape {found[name]}, the engine serves {shape}")


def tensor_names(folder: Path) -> set[str]:
    """Names of a folder's tensors. Raises WeightsError when it cannot be read."""
    return set(_shapes(folder))


def digests_held(folder: Path, sums: Mapping[str, str], dtype: str) -> dict[str, str]:
    """Name -> XXH3-128 of each tensor of `folder`, where the server holds all its bytes; else the server's own hash.

    `sums` is the server's report: its name -> first 16 hex digits of SHA-256 of the tensor's bytes in `dtype`. Tensors
    of the server whose names match nothing in the folder are left out.
    Raises WeightsError when no tensor is in the folder, as when it has been pruned meanwhile.
    """
    ours = TensorSums(dtype)
    with ExitStack() as stack:
        files = _open(stack, folder)
        if not files:
            raise WeightsError(f"{folder}: no tensors to compare with")
        for served in sums:
            for part in [served] if served in files else _parts(served, files):
                if part in files:
                    tensor = files[part].get_tensor(part)
                    ours.add(served, part, tensor, digest(tensor))
    return ours.held(sums)


class TensorSums:
    """Hashes that a server has to report for tensors that come one by one, to be compared with those it reports."""

    def __init__(self, dtype: str) -> None:
        """`dtype` is the number format in which the server computes."""
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._rows: dict[str, Any] = {}
        """Name of a tensor in the server -> SHA-256 of its rows that came so far."""
        self._filled_up: dict[str, Any] = {}
        """Name in the server -> SHA-256 of the rows with the zeros that the server pads them with."""
        self._turned: dict[str, Any] = {}
        """Name in the server -> SHA-256 of the transposed matrix, where the server may hold that."""
        self._digests: dict[str, dict[str, str]] = {}
        """Name in the server -> name in the folder -> digest, of the tensors that came."""

    def add(self, served: str, name: str, tensor: torch.Tensor, its_digest: str) -> None:
        """Add the folder's tensor `name`, whose rows are the next rows of the server's tensor `served`."""
        rounded = tensor.to(self._dtype)
        rows = self._rows.setdefault(served, hashlib.sha256())
        rows.update(_bytes(rounded))
        self._filled_up[served] = rows.copy()
        if rounded.ndim:
            self._filled_up[served].update(bytes(-len(rounded) % VOCAB_ROWS * rounded[0].nbytes))
        if served.endswith(TURNED):
            self._turned[served] = hashlib.sha256(_bytes(rounded.t()))
        self._digests.setdefault(served, {})[name] = its_digest

    def held(self, sums: Mapping[str, str]) -> dict[str, str]:
        """Compare with the hashes that a server reports, as `digests_held`.

        Tensors that came in another order than the server's rows are left out. A head that the server reports and that
        never came is compared with the embedding.
        """
        digests: dict[str, str] = {}
        wrong: dict[str, str] = {}
        for name, held in sums.items():
            served = EMBEDDING if name == TIED_HEAD and name not in self._digests else name
            parts = self._digests.get(served, {})
            if list(parts) not in ([served], _parts(served, parts)):
                continue
            known = (self._rows, self._filled_up, self._turned)
            ours = {sums_of[served].hexdigest()[:16] for sums_of in known if served in sums_of}
            digests |= parts
            wrong |= {} if held in ours else dict.fromkeys(parts, f"sha256:{held}")
        return digests | wrong


def served_name(name: str) -> str:
    """Name of the tensor in a server that holds this tensor's rows, alone or fused with others."""
    layer, experts, its = name.partition(".experts.")
    for fused, spellings in EXPERTS.items() if experts else ():
        if its.split(".")[1:] in [[module, "weight"] for modules in spellings for module in modules]:
            return f"{layer}.experts.{fused}"
    for fused, modules in FUSED.items():
        for module in modules:
            if f".{module}." in name:
                return name.replace(f".{module}.", f".{fused}.")
    return name


def _parts(served: str, known: Container[str]) -> list[str]:
    """Names of the tensors whose rows make up a server's tensor; the name itself where it is not fused.

    Tensors of experts are listed as long as they are `known`.
    """
    for fused, modules in FUSED.items():
        if f".{fused}." in served:
            return [served.replace(f".{fused}.", f".{module}.") for module in modules]
    layer, _, fused = served.rpartition(".")
    parts: list[str] = []
    for modules in EXPERTS.get(fused, ()):
        for expert in itertools.count():
            its = [f"{layer}.{expert}.{module}.weight" for module in modules]
            if not all(one in known for one in its):
                break
            parts += its
    return parts or [served]


def _open(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """Name of each tensor -> the open file that holds it. Raises WeightsError."""
    files: dict[str, Any] = {}
    for path in files_of_weights(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path}: cannot be read: {error}") from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with ExitStack() as stack:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in _open(stack, folder).items()}


def _unread(folder: Path, names: Collection[str]) -> set[str]:
    """Return the `names` that a learner never loads, since transformers ignores them for this kind of model."""
    try:
        ignored = ignored_weights(config_of_folder(folder))
    except ModelFolderError:
        return set()
    return {name for name in names if any(re.search(pattern, name) for pattern in ignored)}


def _is_tied(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("tie_word_embeddings"))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
