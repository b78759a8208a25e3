"""New weights on their way into a vLLM worker: read or received, and checked, by a thread beside the worker's steps.

Methods of workers are called by name through /collective_rpc with strings. The other end is `mrl.engines.vllm`.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from broadcast_member import digest, receive  # type: ignore[import-not-found]
from safetensors import safe_open

MOST_THREADS = 8

Tensors = dict[str, torch.Tensor]


class ArrivingWeights:
    """The part of a worker extension that changes nothing."""

    mrl_arriving: Future[Any]
    mrl_looking: Future[dict[str, str]]

    def mrl_take(self, order: str) -> None:
        """Begin to look at the tensors of a Hugging Face folder, beside what is served; `mrl_arrival` tells the rest.

        `order` is JSON: "folder", and in "digests" the XXH3-128 of each tensor that has to be there.
        """
        told = json.loads(order)
        self.mrl_arriving = in_thread(lambda: self._taken(Path(told["folder"]), told["digests"]))

    def mrl_join(self, seat: str) -> None:
        """As `mrl_take`, of a broadcast."""
        self.mrl_arriving = in_thread(lambda: receive(json.loads(seat)))

    def mrl_arrival(self) -> dict[str, str]:
        """{} when all of it is here, as it was published; else {"awaited": ""}, {"lost": why} or {"refused": why}."""
        if not self.mrl_arriving.done():
            return {"awaited": ""}
        error = self.mrl_arriving.exception()
        if error is None:
            return {}
        return {"lost" if isinstance(error, ConnectionError) else "refused": f"{type(error).__name__}: {error}"}

    def mrl_look(self) -> None:
        """Begin to read what layers compute with, beside the steps; `mrl_checksums` has the answer."""
        self.mrl_looking = in_thread(self._held)

    def mrl_checksums(self) -> dict[str, str]:
        """Name that was published -> XXH3-128 of the bytes of that tensor, read back from what layers compute with.

        {"awaited": ""} while it looks. Empty before the first load.
        """
        return self.mrl_looking.result() if self.mrl_looking.done() else {"awaited": ""}

    def _taken(self, folder: Path, digests: dict[str, str]) -> Any:
        """Views of the files, all of whose bytes are right."""
        tensors = mapped(folder)
        check(dict(zip(tensors, in_threads(digest, tensors.values()), strict=True)), digests)
        return tensors

    def _held(self) -> dict[str, str]:
        raise NotImplementedError


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """What becomes of it, in a thread of its own."""
    thread = ThreadPoolExecutor(1)
    future = thread.submit(work)
    thread.shutdown(wait=False)
    return future


def in_threads(work: Callable[..., Any], *items: Any) -> list[Any]:
    """Its results, by as many threads as torch may use."""
    with ThreadPoolExecutor(min(MOST_THREADS, torch.get_num_threads())) as threads:
        return list(threads.map(work, *items))


def mapped(folder: Path) -> Tensors:
    """Name -> view of the file that holds it, which stays open as long as there is one. Raises OSError."""
    return dict(_opened(folder))


def check(found: dict[str, str], wanted: dict[str, str]) -> None:
    """Raises ValueError unless all that are wanted were found so."""
    wrong = [name for name, its_digest in wanted.items() if found.get(name) != its_digest]
    if wrong:
        raise ValueError(f"other bytes than were published, of {', '.join(wrong[:5])}")


def _opened(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors")
    with ExitStack() as closing:
        for path in files:
            file = closing.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)
