"""What a Hugging Face folder holds, compared with what an inference server has or says that it has."""

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
"""Modules that servers make of several, whose rows lie behind each other in this order."""
EXPERTS = {"w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")), "w2_weight": (("down_proj",), ("w2",))}
"""Parameters that servers make of a layer's experts: of each expert these modules, as its family calls them."""
TURNED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
"""Matrices that GPT-2 keeps the other way round than a server's linear layers; other families have these names too."""
TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
VOCAB_ROWS = 64
"""Servers fill the rows of embeddings and heads up with zeros to a multiple of this."""


def check_same_tensors(folder: Path, like: Path) -> None:
    """Raises WeightsError unless `folder` has the tensors of `like` by name and shape; a tied head may be left out.

    So may what transformers itself does not read of such a model, as layers that predict further tokens.
    A folder `like` that is not on this machine, or has no safetensors, tells nothing.
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
        raise WeightsError(f"{folder}: not the tensors that the engine serves, {names[:5]} are in one of the two only")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise WeightsError(f"{folder}: {name} has shape {found[name]}, the engine serves {shape}")


def tensor_names(folder: Path) -> set[str]:
    """What a folder holds. Raises WeightsError when it cannot be read."""
    return set(_shapes(folder))


def digests_held(folder: Path, sums: Mapping[str, str], dtype: str) -> dict[str, str]:
    """Name -> XXH3-128 of each tensor of `folder` of which the server holds every byte, its hash when it does not.

    `sums` are the server's: its name -> first 16 hex digits of SHA-256 of the tensor's bytes in `dtype`. What the
    server holds under a name that the folder does not explain is left out.
    Raises WeightsError when nothing is in the folder, as when it has been pruned meanwhile.
    """
    ours = TensorSums(dtype)
    with ExitStack() as stack:
        files = _open(stack, folder)
        if not files:
            raise WeightsError(f"{folder}: has no tensors to compare with")
        for served in sums:
            for part in [served] if served in files else _parts(served, files):
                if part in files:
                    tensor = files[part].get_tensor(part)
                    ours.add(served, part, tensor, digest(tensor))
    return ours.held(sums)


class TensorSums:
    """Hashes of what a server makes of tensors that come one by one, to be compared with those that it reports."""

    def __init__(self, dtype: str) -> None:
        """The server computes in this type."""
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._rows: dict[str, Any] = {}
        """Name that the server gives a tensor -> SHA-256 of the rows that came so far."""
        self._filled_up: dict[str, Any] = {}
        """The same with the zeros that the server puts behind the last tensor."""
        self._turned: dict[str, Any] = {}
        """That of the transposed matrix, where the server may hold it."""
        self._digests: dict[str, dict[str, str]] = {}

    def add(self, served: str, name: str, tensor: torch.Tensor, its_digest: str) -> None:
        """The next rows of the server's tensor `served` are those of our tensor `name`."""
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
        """As `digests_held`; tensors that came in another order than the server's are left out, too.

        A head that the server has and that never came is held to the embedding.
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
    """The tensor that servers make of this one, and of others."""
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
    """The tensors whose rows a server's tensor is made of, unless they lie together in the folder, too.

    Those of experts as far as they are `known`.
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
    """Those of the names that a learner never loads, as transformers leaves them out by the model's own word."""
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
