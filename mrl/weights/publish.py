"""Publishing: a version that engines can load, as a Hugging Face folder with a manifest.

A version is copied while the model stands still, and becomes a folder beside training. Where learner and engines are on
one host its files are links into the memory of the learner's ranks; elsewhere each rank writes a file to the disk.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from mrl.errors import RoleFailed
from mrl.models.lora import FILE
from mrl.models.memory_file import SHARED
from mrl.models.number_formats import NumberFormat
from mrl.models.parameters import TensorSource, named_weights, plain_sources, released
from mrl.models.tensor_file import write_tensors
from mrl.models.tensor_header import INDEX
from mrl.records.version import Version
from mrl.weights.adapters import AdapterFormat
from mrl.weights.canary import make_canary
from mrl.weights.manifest import MANIFEST, Canary, Manifest
from mrl.weights.read_lock import FILES, is_read_locked
from mrl.weights.staging import Staged, Staging

SHARD_BYTES = 2 * 1024**3
"""Bytes of tensors that are in memory together while an export is written."""
PARTS = ".parts-"
STILL_S = 600.0
"""Most seconds in which no rank adds anything to a version that was copied; the time of the whole has no bound."""
CLOSE_S = 5.0
POLL_S, LOOK_S = 0.005, 1.0
"""Seconds between two looks for the end of a wait, and for files added meanwhile."""

WhenWhole = Callable[[Path], None]
"""Called with the path of a complete version's manifest, by the thread that writes it."""


class Part(msgspec.Struct, frozen=True):
    """Part of a version's folder that one rank has added."""

    file: str
    """Name of the file; empty where the rank had nothing to add."""
    tensors: dict[str, str]
    """Name -> digest."""
    failure: str = ""


class Publisher:
    """Publishes versions of one policy in one folder and keeps the newest few. Every rank of a learner has one."""

    def __init__(
        self,
        folder: Path,
        policy: str,
        *,
        model_folder: Path | None = None,
        adapters: AdapterFormat | None = None,
        dtype: str = "",
        in_memory: bool = False,
        on_gpu: bool = False,
        shares_on: torch.device | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        keep: int = 2,
    ) -> None:
        """Weights are published as they are, or in torch's `dtype`; the other files of `model_folder` lie beside them.

        With `adapters` only adapters are published, as they are. A version that is published `in_memory` can be read
        as long as this process lives, and where `shares_on` is given, on that device as well. A rank beyond `num_ranks`
        gathers with the others, and copies nothing.
        """
        self.folder, self.policy, self._model_folder = folder, policy, model_folder
        self._adapters, self._in_memory, self._keep = adapters, in_memory, keep
        self._rank, self._num_ranks = rank, 1 if adapters else num_ranks
        self._staging = Staging(
            f"weights of {policy}",
            dtype="" if adapters else dtype,
            rank=rank,
            num_ranks=self._num_ranks,
            pinned=on_gpu,
            num_kept=keep - 1 if in_memory else 0,
            shares_on=shares_on if in_memory else None,
        )
        self._thread: threading.Thread | None = None
        self._parts = folder
        """Folder in which the version that was begun last is written."""
        self._failure: BaseException | None = None
        self._last: Path | None = None
        if rank == 0:
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
        """Publish a model that this process holds whole, and wait for it; return the manifest's path."""
        canary = make_canary(model, canary_ids, number_format)
        return self.publish_weights(released(model, named_weights(model).items()), version, canary)

    def publish_weights(self, weights: Iterable[tuple[str, Tensor]], version: Version, canary: Canary) -> Path:
        """Publish named tensors, and wait for it; return the manifest's path."""
        self.begin(plain_sources(weights), version, canary)
        self.finish()
        assert self._last is not None
        return self._last

    def begin(
        self,
        sources: Sequence[TensorSource],
        version: Version,
        canary: Canary | None,
        when_whole: WhenWhole | None = None,
        *,
        lasts: bool = False,
    ) -> None:
        """Copy a version, and begin to make a folder of it, in a thread.

        All ranks call it with the same sources; the first rank's `canary` counts. The folder appears under its name
        when it is whole, and is not synced: a resume writes it anew. A version that `lasts` outlives this process.
        Waits for the version before.
        Raises DeviceError, OSError, RoleFailed when this version cannot be copied, or the one before came to nothing.
        """
        self.finish()
        if self._rank >= self._num_ranks:
            for source in sources:
                source.whole()
            return
        if self._rank == 0:
            self._prune()
        staged = self._staging.take(sources)
        self._drop_what_was_in(staged.file.path)
        as_link = self._in_memory and not lasts
        self._parts = self.folder / f"{PARTS}{version}"
        arguments = (staged, as_link, version, canary, when_whole)
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"publishing {version}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the version that was begun is whole. Raises OSError, RoleFailed when it cannot be."""
        if self._thread is not None:
            growth = _Growth(self._parts)
            while self._thread.is_alive():
                self._thread.join(LOOK_S)
                growth.check(self._thread.name)
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises OSError, RoleFailed when a version that was begun came to nothing; does not wait."""
        if self._failure is not None:
            raise self._failure

    @property
    def progress(self) -> int:
        """Bytes in the folder of the version under way, of all ranks; they change as long as it gets on.

        From any thread.
        """
        if self._thread is None or not self._thread.is_alive():
            return 0
        try:
            return sum(path.stat().st_size for path in self.folder.glob(f"{PARTS}*/*"))
        except OSError:  # it has just become whole
            return 0

    def close(self) -> None:
        """Give memory back. Versions that lie in it are gone for readers that have not opened them."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():  # it ends with the process, and so does the memory
                return
        for manifest in self.folder.glob(f"[0-9]*/{MANIFEST}") if self._rank == 0 else ():
            if any(path.is_symlink() for path in manifest.parent.glob(FILES)):
                remove(manifest)
        self._staging.close()

    def _write(
        self, staged: Staged, as_link: bool, version: Version, canary: Canary | None, when_whole: WhenWhole | None
    ) -> None:
        parts = self._parts
        try:
            parts.mkdir(exist_ok=True)
            self._add_part(parts, staged, as_link)
            if self._rank == 0:
                assert canary is not None, "the first rank has a canary"
                self._last = self._complete(parts, version, canary)
                if when_whole is not None:
                    when_whole(self._last)
        except BaseException as error:  # noqa: BLE001 - it is raised again by whoever waits
            self._failure = error
            if self._rank == 0:
                shutil.rmtree(parts, ignore_errors=True)

    def _add_part(self, parts: Path, staged: Staged, as_link: bool) -> None:
        """Write, or link, the tensors that this rank has copied, and tell the first rank."""
        name = self._file_name(self._rank) if staged.names else ""
        try:
            if name and as_link:
                (parts / name).symlink_to(staged.file.path)
                if staged.shared is not None:
                    (parts / name).with_suffix(SHARED).write_bytes(msgspec.json.encode(staged.shared))
            elif name:
                if staged.shared is not None:  # its file is whole when the digests are known
                    wait(staged.digests.values())
                shutil.copyfile(staged.file.path, parts / name)
            digests = {}
            for tensor, its_digest in staged.digests.items():
                digests[tensor] = its_digest.result()
                _unsaid(parts, self._rank).touch()  # shows the first rank that it goes on
            part = Part(name, digests)
        except BaseException as error:  # the first rank waits for a word
            self._say(parts, Part("", {}, failure=repr(error)))
            raise
        staged.file.release()
        self._say(parts, part)

    def _say(self, parts: Path, part: Part) -> None:
        unfinished = _unsaid(parts, self._rank)
        unfinished.write_bytes(msgspec.json.encode(part))
        unfinished.rename(_told(parts, self._rank))

    def _complete(self, parts: Path, version: Version, canary: Canary) -> Path:
        """Make a version of the parts of all ranks; return its manifest's path."""
        told = [_await_part(parts, rank) for rank in range(self._num_ranks)]
        for rank, part in enumerate(told):
            if part.failure:
                raise RoleFailed(f"rank {rank} could not add its part of version {version}: {part.failure}")
            _told(parts, rank).unlink()
        tensors = {name: its_digest for part in told for name, its_digest in part.tensors.items()}
        if self._adapters is not None:
            self._adapters.describe(parts, tensors)
        else:
            self._add_model_files(parts)
            if self._num_ranks > 1:
                _write_index(parts, {name: part.file for part in told for name in part.tensors})
        base = {} if self._adapters is None else self._adapters.base
        manifest = Manifest(policy=self.policy, version=version, tensors=tensors, base=base, canary=canary)
        (parts / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        folder = self.folder / str(version)
        if folder.exists():  # an earlier life of the learner left it
            remove(folder / MANIFEST)
        parts.rename(folder)
        return folder / MANIFEST

    def _file_name(self, rank: int) -> str:
        if self._adapters is not None:
            return FILE
        of = f"-{rank + 1:05d}-of-{self._num_ranks:05d}" if self._num_ranks > 1 else ""
        return f"model{of}.safetensors"

    def _add_model_files(self, folder: Path) -> None:
        for source in self._model_folder.iterdir() if self._model_folder else ():
            if source.is_file() and "safetensors" not in source.name and source.name != MANIFEST:
                (folder / source.name).symlink_to(source.resolve())

    def _drop_what_was_in(self, file: Path) -> None:
        """Remove the version that lay in a file which this rank has written over, before any engine can read the file.

        The first rank has pruned that version, unless a reader had begun to hold it: by the file of another rank.
        """
        for link in self.folder.glob(f"[0-9]*/{self._file_name(self._rank)}"):
            with suppress(OSError):  # it is no link, or has gone
                if link.readlink() == file:
                    remove(link.parent / MANIFEST)

    def _prune(self) -> None:
        """Make room for a version: remove all but the newest, those of earlier lives included.

        A version with a read lock stays until the next time: an engine is being proved against its files.
        """
        manifests = sorted(self.folder.glob(f"[0-9]*/{MANIFEST}"), key=_version_of)
        for manifest in manifests[: len(manifests) - self._keep + 1]:
            if not is_read_locked(manifest.parent):
                remove(manifest)


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights as Hugging Face does, in files of about `SHARD_BYTES`. Raises OSError."""
    places: dict[str, str] = {}
    for number, shard in enumerate(_shards(weights), 1):
        name = f"model-{number:05d}.safetensors"
        with (folder / name).open("wb", buffering=0) as file:
            write_tensors(file, shard)
        places |= dict.fromkeys(shard, name)
    _name_shards(folder, places)


def remove(manifest_path: Path) -> None:
    """Remove a published version; readers that have its files open keep them."""
    manifest_path.unlink(missing_ok=True)
    shutil.rmtree(manifest_path.parent, ignore_errors=True)


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield consecutive tensors on the CPU, at most `SHARD_BYTES` at once; a larger tensor alone."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield shard


def _name_shards(folder: Path, places: dict[str, str]) -> None:
    """Give the files their Hugging Face names: one alone, or several with an index."""
    names = sorted(set(places.values()))
    if len(names) == 1:
        (folder / names[0]).rename(folder / "model.safetensors")
        return
    final = {name: f"{name.removesuffix('.safetensors')}-of-{len(names):05d}.safetensors" for name in names}
    for name in names:
        (folder / name).rename(folder / final[name])
    _write_index(folder, {tensor: final[name] for tensor, name in places.items()})


def _write_index(folder: Path, files: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")


def _told(parts: Path, rank: int) -> Path:
    return parts / f"part-{rank}.json"


def _unsaid(parts: Path, rank: int) -> Path:
    return parts / f".{rank}.json"


def _await_part(parts: Path, rank: int) -> Part:
    """Wait for a rank's part. Raises RoleFailed when it does not come while no rank adds anything."""
    path, growth = _told(parts, rank), _Growth(parts)
    while not path.exists():
        growth.check(f"rank {rank}")
        time.sleep(POLL_S)
    return msgspec.json.decode(path.read_bytes(), type=Part)


class _Growth:
    """Watch for files that are still added to a folder, or grow there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: list[tuple[str, int, int]] = []
        self._looked_s = self._grew_s = time.monotonic()

    def check(self, who: str) -> None:
        """Raises RoleFailed when nothing was added for too long."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        found = self._look()
        self._looked_s = now_s
        if found != self._found:
            self._found, self._grew_s = found, now_s
        elif now_s - self._grew_s > STILL_S:
            raise RoleFailed(f"{who}: nothing was added to {self._folder} for {STILL_S:g} s")

    def _look(self) -> list[tuple[str, int, int]]:
        found = []
        with suppress(FileNotFoundError):  # the folder got its final name in this moment
            for file in os.scandir(self._folder):
                state = file.stat(follow_symlinks=False)
                found.append((file.name, state.st_size, state.st_mtime_ns))
        return sorted(found)


def _version_of(manifest: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in manifest.parent.name.split("."))
