"""Saving and restoring checkpoint folders."""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
from torch import Tensor

from mrl.errors import CheckpointError

FORMAT = 1


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint folder holds; `files` maps names to blake2b digests."""

    format: int
    policy: str
    step: int
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint in memory."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one policy, the newest few of them kept."""

    def __init__(self, folder: Path, policy: str, *, keep: int = 2) -> None:
        self._folder, self._policy, self._keep = folder, policy, keep

    def save(self, step: int, *, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Write `step_N` under a temporary name, sync, rename, then drop the oldest; returns the folder."""
        final, temporary = self._folder / f"step_{step}", self._folder / f".incomplete-step_{step}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        contents = {
            "model.safetensors": safetensors.torch.save(_plain(model)),
            "optimizer.safetensors": safetensors.torch.save(_plain(optimizer)),
            "state.json": msgspec.json.encode(state),
        }
        for name, data in contents.items():
            _write_synced(temporary / name, data)
        digests = {name: _digest(data) for name, data in contents.items()}
        manifest = CheckpointManifest(format=FORMAT, policy=self._policy, step=step, files=digests)
        _write_synced(temporary / "manifest.json", msgspec.json.encode(manifest))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync_folder(self._folder)
        self._prune()
        return final

    def steps(self) -> list[int]:
        """Steps that have a whole folder, ascending."""
        found = (path.name.removeprefix("step_") for path in self._folder.glob("step_*"))
        return sorted(int(name) for name in found if name.isdigit())

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints of later steps: the run goes on from `step`, and they no longer belong to it."""
        for later in [found for found in self.steps() if found > step]:
            shutil.rmtree(self._folder / f"step_{later}", ignore_errors=True)

    def load_newest(self) -> Checkpoint | None:
        """The newest checkpoint that passes its checksums, None when there is none at all.

        Raises CheckpointError when there are some and none is sound.
        """
        problems = []
        for step in reversed(self.steps()):
            try:
                return self.load(step)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError("no checkpoint is sound: " + "; ".join(problems))
        return None

    def load(self, step: int) -> Checkpoint:
        """One checkpoint. Raises CheckpointError when it is torn or belongs to another policy or format."""
        folder = self._folder / f"step_{step}"
        try:
            manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=CheckpointManifest)
            contents = {name: (folder / name).read_bytes() for name in manifest.files}
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{folder}: cannot be read: {error}") from error
        if (manifest.format, manifest.policy) != (FORMAT, self._policy):
            raise CheckpointError(f"{folder}: is format {manifest.format} of policy {manifest.policy}")
        for name, data in contents.items():
            if _digest(data) != manifest.files[name]:
                raise CheckpointError(f"{folder / name}: checksum differs from the manifest")
        return Checkpoint(
            manifest.step,
            safetensors.torch.load(contents["model.safetensors"]),
            safetensors.torch.load(contents["optimizer.safetensors"]),
            msgspec.json.decode(contents["state.json"]),
        )

    def _prune(self) -> None:
        for step in self.steps()[: -self._keep]:
            shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
