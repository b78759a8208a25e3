"""Digests of tensors, and a published folder compared with its manifest.

XXH3 finds what storage, transfer and mistakes do to weights, at the speed of memory. It is no protection from somebody
who can write into the run folder: nothing here is.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.errors import WeightsError
from mrl.weights.manifest import Manifest


def digest(tensor: Tensor) -> str:
    """XXH3-128 of the tensor's bytes in row-major order, as 32 hex digits."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(raw.numpy().data)


def verify(folder: Path, manifest: Manifest) -> None:
    """Read every tensor of a published version. Raises WeightsError unless all are what the learner published."""
    found: set[str] = set()
    for name, tensor in _tensors(folder, manifest):
        if manifest.tensors.get(name) != digest(tensor):
            raise WeightsError(f"{folder}: checksum of {name} differs from the manifest of version {manifest.version}")
        found.add(name)
    if missing := manifest.tensors.keys() - found:
        raise WeightsError(f"{folder}: version {manifest.version} lacks {sorted(missing)[:5]}")


def _tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    for file in manifest.files:
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{folder / file}: weights of version {manifest.version} cannot be read: {error}"
            ) from error
