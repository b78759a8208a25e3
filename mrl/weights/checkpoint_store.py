"""Checkpoints: everything that a learner needs to go on, in folders that exist whole or not at all.

    checkpoints/<policy>/step_N/   rank_00000.safetensors  rank_00001.safetensors ...  state.json  manifest.json

Every rank writes the rows that it holds, without a word to the others; the manifest says which rows of which tensor lie
in which file, with their checksums, so that any other number of ranks can read them. The files are those of torch's
distributed checkpoints (DCP) as safetensors, and `torch.distributed.checkpoint.load` reads them into any layout by its
`HuggingFaceStorageReader`. DCP does not write them: its own writer describes a checkpoint by a pickle, neither that nor
its writer of safetensors keeps checksums or syncs the folder, and both need collectives for every checkpoint, beside
those of training.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.errors import CheckpointError, WeightsError
from mrl.files import replace_file
from mrl.models.tensor_file import read_tensors, write_tensors
from mrl.weights.tensor_pieces import Piece, dcp_metadata

FORMAT = 3
MANIFEST, STATE = "manifest.json", "state.json"
UNFINISHED = ".incomplete-"
POLL_S = 0.05
MAX_REASON_CHARS = 200
MIN_KEPT = 3
"""Checkpoints that every policy of a synchronous run keeps at least.

A policy may have saved a step that another one has yet to save, while the last save of the other one is still on its
way to the disk.
"""


class StoredPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one tensor in one file; `digest` is that of `mrl.models.tensor_file`."""

    file: str
    first_row: int
    held_shape: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    digest: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a checkpoint folder."""

    format: int
    policy: str
    step: int
    state_digest: str
    tensors: dict[str, list[StoredPiece]]
    digest: str = ""
    """Digest of all other fields."""

    def sealed(self) -> "CheckpointManifest":
        """Return the same manifest with its digest."""
        plain = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(plain, digest=_digest(msgspec.json.encode(plain)))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on the disk; its tensors are read row by row."""

    folder: Path
    step: int
    state: dict[str, Any]
    tensors: Mapping[str, list[StoredPiece]]
    _files: dict[str, Any] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self.tensors[name][0].shape

    def read(self, name: str, first_row: int = 0, num_rows: int | None = None) -> Tensor:
        """Return rows of a tensor, whichever files they lie in; all of it by default."""
        if not self.shape(name):
            return self._open(self.tensors[name][0].file).get_tensor(name)
        last_row = self.shape(name)[0] if num_rows is None else first_row + num_rows
        pieces = sorted(self.tensors[name], key=lambda piece: piece.first_row)
        found = [self._rows(name, piece, first_row, last_row) for piece in pieces]
        return torch.cat([rows for rows in found if len(rows)] or found[:1])

    def close(self) -> None:
        """Unmap the files, whose pages else count as this process's memory; a later read opens them again."""
        self._files.clear()

    def check_readable(self, file: str) -> None:
        """Raises SafetensorError, OSError where the library that reads the rows cannot make sense of the file."""
        self._open(file)

    def _rows(self, name: str, piece: StoredPiece, first_row: int, last_row: int) -> Tensor:
        stored = self._open(piece.file).get_slice(name)
        begin = max(0, first_row - piece.first_row)
        rows: Tensor = stored[begin : max(begin, last_row - piece.first_row)]
        return rows

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(str(self.folder / file), framework="pt")
        return self._files[file]


class CheckpointStore:
    """Checkpoints of one policy, of which the newest few are kept."""

    def __init__(self, folder: Path, policy: str, *, keep: int = 2) -> None:
        self._folder, self._policy, self._keep = folder, policy, keep

    def write_pieces(self, step: int, pieces: Mapping[str, Piece], *, rank: int, life: int) -> None:
        """Write and sync one rank's pieces of a checkpoint that does not count yet. Raises OSError."""
        folder = self._unfinished(step, life)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{rank:05d}.safetensors"
        with (folder / name).open("wb", buffering=0) as file:
            tensors = {key: piece.local for key, piece in pieces.items()}
            digests = write_tensors(file, tensors, about=dcp_metadata(pieces))
            os.fsync(file.fileno())
        listed = {
            key: StoredPiece(
                file=name,
                first_row=piece.first_row,
                held_shape=tuple(piece.local.shape),
                shape=piece.shape,
                dtype=str(piece.local.dtype),
                digest=digests[key],
            )
            for key, piece in pieces.items()
        }
        replace_file((folder / name).with_suffix(".json"), msgspec.json.encode(listed))

    def complete(self, step: int, state: bytes, *, life: int, num_ranks: int = 1, timeout_s: float = 600.0) -> Path:
        """Await the pieces of all ranks, add `state` (JSON), and give the folder its name; then delete the oldest.

        Raises CheckpointError when a rank has not written its pieces within `timeout_s`, OSError.
        """
        folder, final = self._unfinished(step, life), self._folder / f"step_{step}"
        tensors: dict[str, list[StoredPiece]] = {}
        deadline_s = time.monotonic() + timeout_s
        lists = [folder / f"rank_{rank:05d}.json" for rank in range(num_ranks)]
        for path in lists:
            for name, piece in _await_list(path, deadline_s, timeout_s).items():
                tensors.setdefault(name, []).append(piece)
        for path in lists:
            path.unlink()
        replace_file(folder / STATE, state)
        manifest = CheckpointManifest(
            format=FORMAT, policy=self._policy, step=step, state_digest=_digest(state), tensors=tensors
        )
        replace_file(folder / MANIFEST, msgspec.json.encode(manifest.sealed()))
        _sync(folder)
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        _sync(self._folder)
        self._prune()
        return final

    def steps(self) -> list[int]:
        """Return the steps that have a whole folder, ascending."""
        found = (path.name.removeprefix("step_") for path in self._folder.glob("step_*"))
        return sorted(int(name) for name in found if name.isdigit())

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints of later steps: the run goes on from `step`, and they no longer belong to it."""
        for later in [found for found in self.steps() if found > step]:
            shutil.rmtree(self._folder / f"step_{later}", ignore_errors=True)

    def discard_unfinished(self) -> None:
        """Delete checkpoints that earlier lives of the learner did not complete."""
        for torn in self._folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(torn, ignore_errors=True)

    def open(self, step: int) -> Checkpoint:
        """Return a checkpoint whose manifest and state are sound.

        Raises CheckpointError when they are not, or are those of another policy or step.
        """
        folder = self._folder / f"step_{step}"
        try:
            data = (folder / MANIFEST).read_bytes()
            kind = msgspec.json.decode(data, type=dict[str, Any])
            if (kind.get("format"), kind.get("policy")) != (FORMAT, self._policy):
                raise CheckpointError(
                    f"{folder}: has format {kind.get('format')!r:.40} of policy {kind.get('policy')!r:.40}, "
                    f"wanted format {FORMAT} of policy {self._policy!r}"
                )
            manifest = msgspec.json.decode(data, type=CheckpointManifest)
            if manifest != manifest.sealed():
                raise CheckpointError(f"{folder / MANIFEST}: checksum does not match")
            state = (folder / STATE).read_bytes()
        except CheckpointError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise _unreadable(folder, error) from error
        if _digest(state) != manifest.state_digest:
            raise CheckpointError(f"{folder / STATE}: checksum differs from the manifest")
        if manifest.step != step:
            raise CheckpointError(f"{folder}: the manifest is of step {manifest.step}")
        return Checkpoint(folder, step, msgspec.json.decode(state), manifest.tensors)

    def problem(self, step: int, *, rank: int = 0, num_ranks: int = 1) -> str | None:
        """Return what is wrong with a checkpoint, or None; each of `num_ranks` ranks reads its part of the files."""
        try:
            checkpoint = self.open(step)
            files = sorted({piece.file for pieces in checkpoint.tensors.values() for piece in pieces})
            for file in files[rank::num_ranks]:
                _check_file(checkpoint, file)
        except (CheckpointError, WeightsError) as error:
            return str(error)
        return None

    def _unfinished(self, step: int, life: int) -> Path:
        return self._folder / f"{UNFINISHED}{life}-step_{step}"

    def _prune(self) -> None:
        for step in self.steps()[: -self._keep]:
            shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)


def _check_file(checkpoint: Checkpoint, file: str) -> None:
    """Raises CheckpointError, WeightsError unless the file holds exactly the tensors that the manifest says."""
    wanted = {
        name: (piece.dtype, piece.held_shape, piece.digest)
        for name, pieces in checkpoint.tensors.items()
        for piece in pieces
        if piece.file == file
    }
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}

    def note(name: str, dtype: torch.dtype, shape: list[int]) -> None:
        kinds[name] = (str(dtype), tuple(shape))

    digests = list(read_tensors(checkpoint.folder / file, note))
    if {name: (*kinds[name], digest) for name, digest in digests} != wanted:
        raise CheckpointError(f"{checkpoint.folder / file}: checksum differs from the manifest")
    try:
        checkpoint.check_readable(file)
    except (SafetensorError, OSError) as error:
        raise _unreadable(checkpoint.folder / file, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    told = " ".join(str(error).split())[:MAX_REASON_CHARS]
    return CheckpointError(f"{path}: cannot be read: {told}")


def _await_list(path: Path, deadline_s: float, timeout_s: float) -> dict[str, StoredPiece]:
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise CheckpointError(f"{path.with_suffix('.safetensors')}: not written within {timeout_s:.0f} s")
        time.sleep(POLL_S)
    return msgspec.json.decode(path.read_bytes(), type=dict[str, StoredPiece])


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
