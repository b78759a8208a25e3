"""New weights on their way into a vLLM worker: read or received, and checked, by a thread beside the worker's steps.

Methods of workers are called by name through /collective_rpc with strings. The other end is `mrl.engines.vllm`.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import xxhash
from broadcast_member import receive  # type: ignore[import-not-found]
from vllm_adapters import held_adapters  # type: ignore[import-not-found]

MOST_THREADS = 8
CHUNK_BYTES = 1024 * 1024
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
TYPES["BOOL"] = torch.bool

Tensors = dict[str, torch.Tensor]


class ArrivingWeights:
    """The part of a worker extension that reads and checks new weights, and changes no served weights."""

    model_runner: Any
    mrl_arriving: Future[Any]
    mrl_looking: Future[dict[str, str]]

    @cached_property
    def mrl_folders(self) -> "OpenFolders":
        """Folders that this worker has opened."""
        return OpenFolders()

    def mrl_take(self, order: str) -> None:
        """Begin to read and check the tensors of a Hugging Face folder, beside the steps; `mrl_arrival` has the result.

        `order` is JSON: "folder", and in "digests" the XXH3-128 of each tensor that has to be there.
        """
        told = json.loads(order)
        self.mrl_arriving = in_thread(lambda: self._taken(Path(told["folder"]), told["digests"]))

    def mrl_join(self, seat: str) -> None:
        """Begin to receive and check the tensors of a broadcast; `seat` is JSON for `broadcast_member.receive`."""
        self.mrl_arriving = in_thread(lambda: receive(json.loads(seat)))

    def mrl_arrival(self) -> dict[str, str]:
        """{} when all tensors are here, as published; else {"awaited": ""}, {"lost": why} or {"refused": why}."""
        if not self.mrl_arriving.done():
            return {"awaited": ""}
        error = self.mrl_arriving.exception()
        if error is None:
            return {}
        return {"lost" if isinstance(error, ConnectionError) else "refused": f"{type(error).__name__}: {error}"}

    def mrl_look(self) -> None:
        """Begin to hash the tensors that layers compute with, beside the steps; `mrl_checksums` has the result."""
        self.mrl_looking = in_thread(self._held)

    def mrl_checksums(self) -> dict[str, str]:
        """Published name -> XXH3-128 of the bytes of that tensor, read back from the tensors that layers compute with.

        {"awaited": ""} while they are read. Empty before the first load.
        """
        return self.mrl_looking.result() if self.mrl_looking.done() else {"awaited": ""}

    def mrl_adapter_checksums(self, folder: str) -> dict[str, str]:
        """Name of each adapter tensor in `folder` -> its XXH3-128 if layers compute with it, else that of their own."""
        return held_adapters(self.model_runner.lora_manager._adapter_manager, Path(folder))

    def _taken(self, folder: Path, digests: dict[str, str]) -> Any:
        """Read all tensors of a folder and check their bytes. Raises ValueError for other bytes than `digests`."""
        with self.mrl_folders.open(folder) as files:
            tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in files.items()}
            found = in_threads(InFile.read_into, files.values(), tensors.values())
        check(dict(zip(tensors, found, strict=True)), digests)
        return tensors

    def _held(self) -> dict[str, str]:
        raise NotImplementedError


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Begin work in a thread of its own, and return the future of its result."""
    thread = ThreadPoolExecutor(1)
    future = thread.submit(work)
    thread.shutdown(wait=False)
    return future


def in_threads(work: Callable[..., Any], *items: Any) -> list[Any]:
    """Results of `work` for all items, by as many threads as torch may use, at most MOST_THREADS."""
    with ThreadPoolExecutor(min(MOST_THREADS, torch.get_num_threads())) as threads:
        return list(threads.map(work, *items))


def check(found: dict[str, str], wanted: dict[str, str]) -> None:
    """Check digests. Raises ValueError unless every name in `wanted` was found with the same digest."""
    wrong = [name for name, its_digest in wanted.items() if found.get(name) != its_digest]
    if wrong:
        raise ValueError(f"checksums differ from the published ones: {', '.join(wrong[:5])}")


class InFile(NamedTuple):
    """A tensor of an open safetensors file."""

    file: BinaryIO
    mapped: np.ndarray | None
    """Bytes of the whole file where it lies in another process's memory, mapped here; None for a file on disk."""
    dtype: torch.dtype
    shape: list[int]
    start: int
    """Offset of the tensor's first byte in the file."""

    def read_into(self, target: torch.Tensor) -> str:
        """Read the tensor into `target`, a contiguous tensor like it; return its digest. Raises EOFError."""
        raw = target.reshape(-1).view(torch.uint8).numpy()
        hashing = xxhash.xxh3_128()
        for done in range(0, len(raw), CHUNK_BYTES):
            chunk, start = raw[done : done + CHUNK_BYTES], self.start + done
            if self.mapped is not None:
                np.copyto(chunk, self.mapped[start : start + len(chunk)])
            elif os.preadv(self.file.fileno(), [chunk.data], start) < len(chunk):
                raise EOFError(f"{self.file.name}: the file is truncated")
            hashing.update(chunk.data)
        return hashing.hexdigest()


class OpenFolders:
    """Folders of safetensors files. Files that lie in another process's memory stay mapped while it writes over them.

    Mapping memory anew for every version would cost more than copying it.
    """

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[int, np.ndarray]] = {}
        """Path of a file in the memory of a process, below /proc -> its inode number, and its bytes."""

    @contextmanager
    def open(self, folder: Path) -> Iterator[dict[str, InFile]]:
        """Open a folder: name -> tensor. Raises OSError, and ValueError for a file that is no safetensors file."""
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{folder}: no *.safetensors files")
        with ExitStack() as closing:
            found: dict[str, InFile] = {}
            for path in paths:
                file = closing.enter_context(path.open("rb", buffering=0))
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
                header.pop("__metadata__", None)
                mapped = self._map(path, file)
                for name, entry in header.items():
                    start = 8 + size + entry["data_offsets"][0]
                    found[name] = InFile(file, mapped, TYPES[entry["dtype"]], entry["shape"], start)
            yield found

    def _map(self, path: Path, file: BinaryIO) -> np.ndarray | None:
        place = os.readlink(path) if path.is_symlink() else ""
        if not place.startswith("/proc/"):
            return None
        self._mapped = {known: kept for known, kept in self._mapped.items() if Path(known).exists()}
        number, size = os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_size
        known, mapped = self._mapped.get(place, (0, np.empty(0, np.uint8)))
        if known != number or len(mapped) != size:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            view = mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ)
            mapped = np.frombuffer(view, np.uint8)
            self._mapped[place] = number, mapped
        return mapped
