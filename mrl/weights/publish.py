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
            blake2b=hashlib.blake2b(data, digest_size=16).hexdigest(),
            canary=make_canary(model, canary_ids),
        )
        path = self._folder / f"{stem}.json"
        replace_file(path, msgspec.json.encode(manifest), sync=False)
        self._prune()
        return path

    def _prune(self) -> None:
        """Drop all but the newest manifests of the folder, those of earlier lives included, with their weights."""
        for old in sorted(self._folder.glob("*.json"), key=_version_of)[: -self._keep]:
            old.unlink(missing_ok=True)
            old.with_suffix(".safetensors").unlink(missing_ok=True)


def _version_of(manifest: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in manifest.stem.split("."))


def snapshot(manifest_path: Path, folder: Path) -> Path:
    """Hard-link a published version into `folder`, where pruning does not reach it; returns the new manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (manifest_path.with_suffix(".safetensors"), manifest_path):
        target = folder / source.name
        if not target.exists():
            target.hardlink_to(source)
    return folder / manifest_path.name
