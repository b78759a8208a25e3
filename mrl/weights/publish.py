"""Publishing: the learner writes a version that its engines can load, as a Hugging Face folder with a manifest."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from torch import Tensor, nn

from mrl.models.number_formats import NumberFormat
from mrl.models.parameters import named_weights
from mrl.models.tensor_file import write_tensors
from mrl.records.version import Version
from mrl.weights.adapters import AdapterFormat, OpenFile
from mrl.weights.canary import make_canary
from mrl.weights.manifest import MANIFEST, Canary, Manifest
from mrl.weights.spares import Spares, is_held

SHARD_BYTES = 2 * 1024**3
"""Tensors that are in memory together while they are written."""
PARTS = ".parts-"
INDEX = "model.safetensors.index.json"


class Publisher:
    """Writes versions of one policy into one folder and keeps the newest few."""

    def __init__(
        self,
        folder: Path,
        policy: str,
        *,
        model_folder: Path | None = None,
        adapters: AdapterFormat | None = None,
        keep: int = 3,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Configuration and tokenizer files of `model_folder` appear beside the weights.

        With `adapters` what is published are adapters alone.
        """
        self.folder, self.policy, self._model_folder = folder, policy, model_folder
        self._adapters = adapters
        self._keep, self._shard_bytes = keep, shard_bytes
        self._spares = Spares(folder / ".spares")
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob(f"{PARTS}*"):
            shutil.rmtree(torn)

    def publish(
        self,
        model: nn.Module,
        version: Version,
        canary_ids: Sequence[Sequence[int]],
        number_format: NumberFormat = "float32",
    ) -> Path:
        """Write the weights of a model that this process holds whole; see `publish_weights`."""
        canary = make_canary(model, canary_ids, number_format)
        return self.publish_weights(named_weights(model).items(), version, canary)

    def publish_weights(self, weights: Iterable[tuple[str, Tensor]], version: Version, canary: Canary) -> Path:
        """Write weights as they come, `shard_bytes` of them in memory at once; returns the manifest's path.

        The folder appears under its name when it is whole. It is not synced: a resume writes it anew.
        """
        parts = Path(tempfile.mkdtemp(dir=self.folder, prefix=PARTS))
        try:
            manifest = self._write(parts, weights, version, canary)
            (parts / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            folder = self.folder / f"{version.run_epoch}.{version.step}"
            _put_in_place(parts, folder)
        except BaseException:
            shutil.rmtree(parts, ignore_errors=True)
            raise
        self._prune()
        return folder / MANIFEST

    def _write(self, folder: Path, weights: Iterable[tuple[str, Tensor]], version: Version, canary: Canary) -> Manifest:
        if self._adapters is not None:
            tensors, base = self._adapters.write(folder, weights, self._spares.open), self._adapters.base
        else:
            tensors, base = write_weights(folder, weights, self._shard_bytes, self._spares.open), {}
            self._add_model_files(folder)
        return Manifest(policy=self.policy, version=version, tensors=tensors, base=base, canary=canary)

    def _add_model_files(self, folder: Path) -> None:
        for source in self._model_folder.iterdir() if self._model_folder else ():
            if source.is_file() and "safetensors" not in source.name and source.name != MANIFEST:
                (folder / source.name).symlink_to(source.resolve())

    def _prune(self) -> None:
        """Drop all but the newest versions of the folder, those of earlier lives included.

        One that is held stays until the next time: its engine is being proved against what lies there.
        """
        for manifest in sorted(self.folder.glob(f"[0-9]*/{MANIFEST}"), key=_version_of)[: -self._keep]:
            if is_held(manifest.parent):
                continue
            manifest.unlink(missing_ok=True)
            self._spares.keep(manifest.parent)
            shutil.rmtree(manifest.parent, ignore_errors=True)


def write_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
    open_file: OpenFile = lambda path: path.open("wb", buffering=0),
) -> dict[str, str]:
    """Write weights as Hugging Face does, in files of about `shard_bytes`; returns name -> digest. Raises OSError."""
    tensors: dict[str, str] = {}
    places: dict[str, str] = {}
    for number, shard in enumerate(_shards(weights, shard_bytes), 1):
        name = f"model-{number:05d}.safetensors"
        with open_file(folder / name) as file:
            tensors |= write_tensors(file, shard)
        places |= dict.fromkeys(shard, name)
    _name_shards(folder, places)
    return tensors


def remove(manifest_path: Path) -> None:
    """Remove a published version; whoever has its files open keeps them."""
    manifest_path.unlink(missing_ok=True)
    shutil.rmtree(manifest_path.parent, ignore_errors=True)


def _shards(weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors on the CPU, so many bytes at once; a larger tensor alone."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield shard


def _name_shards(folder: Path, places: dict[str, str]) -> None:
    """Give the files the names that Hugging Face gives them: one alone, or several with an index."""
    names = sorted(set(places.values()))
    if len(names) == 1:
        (folder / names[0]).rename(folder / "model.safetensors")
        return
    final = {name: f"{name.removesuffix('.safetensors')}-of-{len(names):05d}.safetensors" for name in names}
    for name in names:
        (folder / name).rename(folder / final[name])
    index = {"metadata": {}, "weight_map": {tensor: final[name] for tensor, name in places.items()}}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _put_in_place(parts: Path, folder: Path) -> None:
    """Give the folder its name; one that a former life left under it goes first."""
    parts.chmod(0o755)
    if folder.exists():
        remove(folder / MANIFEST)
    parts.rename(folder)


def _version_of(manifest: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in manifest.parent.name.split("."))
