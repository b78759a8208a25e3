"""Fetching: the tensors of a published version, verified against its manifest."""

import hashlib
from pathlib import Path

import safetensors.torch
from torch import Tensor

from mrl.errors import WeightsError
from mrl.weights.manifest import Manifest


def fetch_weights(manifest_path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of a version. Raises WeightsError when the file is gone, torn, or not the one that was published."""
    path = manifest_path.with_name(manifest.file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path}: weights of version {manifest.version} cannot be read: {error.strerror}") from error
    if hashlib.blake2b(data, digest_size=16).hexdigest() != manifest.blake2b:
        raise WeightsError(f"{path}: checksum differs from the manifest of version {manifest.version}")
    return safetensors.torch.load(data)
