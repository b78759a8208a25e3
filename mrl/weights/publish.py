"""Publishing: the learner writes a version that its engines can fetch."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import safetensors.torch
from torch import nn

from mrl.files import replace_file
from mrl.models.parameters import named_weights
from mrl.records.version import Version
from mrl.weights.canary import make_canary
from mrl.weights.manifest import Manifest


class Publisher:
    """Writes versions of one policy into one folder and keeps the newest few."""

    def __init__(self, folder: Path, policy: str, *, keep: int = 3) -> None:
        self._folder, self._policy, self._keep = folder, policy, keep
        self._written: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, model: nn.Module, version: Version, canary_ids: Sequence[Sequence[int]]) -> Path:
        """Write the weights and their manifest; returns the manifest's path. Not synced: a resume rewrites them."""
        stem = f"{version.run_epoch}.{version.step}"
        weights = {name: tensor.detach().contiguous() for name, tensor in named_weights(model).items()}
        data = safetensors.torch.save(weights)
        replace_file(self._folder / f"{stem}.safetensors", data, sync=False)
        manifest = Manifest(
            policy=self._policy,
            version=version,
            file=f"{stem}.safetensors",
            num_bytes=len(data),
            blake2b=hashlib.blake2b(data, digest_size=16).hexdigest(),
            num_tensors=len(weights),
            canary=make_canary(model, canary_ids),
        )
        path = self._folder / f"{stem}.json"
        encoded = msgspec.json.encode(manifest)
        replace_file(path, encoded, sync=False)
        replace_file(self._folder / "latest.json", encoded, sync=False)
        self._prune(path)
        return path

    def _prune(self, newest: Path) -> None:
        self._written.append(newest)
        while len(self._written) > self._keep:
            old = self._written.pop(0)
            old.unlink(missing_ok=True)
            old.with_suffix(".safetensors").unlink(missing_ok=True)


def snapshot(manifest_path: Path, folder: Path) -> Path:
    """Hard-link a published version into `folder`, where pruning does not reach it; returns the new manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (manifest_path.with_suffix(".safetensors"), manifest_path):
        target = folder / source.name
        if not target.exists():
            target.hardlink_to(source)
    return folder / manifest_path.name
