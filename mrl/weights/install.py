"""Installing: an engine in this process takes over a published version."""

import hashlib
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from mrl.errors import WeightsError
from mrl.weights.manifest import Manifest
from mrl.weights.publish import named_weights


def read_weights(manifest_path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of a version. Raises WeightsError when the file is gone, torn, or not the one that was published."""
    path = manifest_path.with_name(manifest.file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WeightsError(
            f"{path}: the weights of version {manifest.version} cannot be read: {error.strerror}"
        ) from error
    if hashlib.blake2b(data, digest_size=16).hexdigest() != manifest.blake2b:
        raise WeightsError(f"{path}: checksum differs from the manifest of version {manifest.version}")
    return safetensors.torch.load(data)


@torch.no_grad()
def install(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy all weights into the model; names and shapes are checked before the first copy.

    Raises WeightsError when a tensor is missing, unknown, or of another shape; the model is unchanged then.
    """
    own = named_weights(model)
    if own.keys() != weights.keys():
        raise WeightsError(f"weights do not fit the model: differing names {sorted(own.keys() ^ weights.keys())[:5]}")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise WeightsError(f"weights do not fit the model: {name} is {weights[name].shape}, wanted {tensor.shape}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])
