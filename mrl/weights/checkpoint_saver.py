"""Writing of checkpoints beside the training: tensors are copied at once, and go to the disk in a thread.

Writing needs no collective, so that nothing here can meet those of the training. One checkpoint is in flight at a time:
the next save waits until it is on the disk.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from torch import Tensor

from mrl.errors import CheckpointError
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.tensor_pieces import Piece, held_piece

TIMEOUT_S = 1800.0
"""Longest time for one checkpoint to come to the disk, all ranks together."""


class Saver:
    """Saves the pieces that one rank holds; the first of `num_ranks` completes the folder. `life` is the run epoch."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        rank: int,
        num_ranks: int,
        life: int,
        on_saved: Callable[[int], object] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`on_saved` is called with the step once its folder is whole, by the first rank's thread that writes."""
        self._store, self._rank, self._num_ranks, self._life = store, rank, num_ranks, life
        self._timeout_s, self._on_saved = timeout_s, on_saved
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Copy tensors and state and begin to write them; all ranks call it, and the state is that of the first rank.

        Raises as `wait` does, for the checkpoint before.
        """
        self.wait()
        pieces = {name: held_piece(tensor, self._rank) for name, tensor in tensors.items()}
        copies = {
            name: replace(piece, local=_copy(piece.local))
            for name, piece in pieces.items()
            if piece.is_first_copy and (piece.local.ndim == 0 or len(piece.local))
        }
        encoded = msgspec.json.encode(state)
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, encoded), name=f"checkpoint {step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint in flight is on the disk. Raises OSError, CheckpointError when it was not saved."""
        if self._thread is None:
            return
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(f"{self._thread.name}: not written to disk within {self._timeout_s:.0f} s")
        self._thread = None
        if self._failure is not None:
            raise self._failure

    def _write(self, step: int, pieces: Mapping[str, Piece], state: bytes) -> None:
        try:
            self._store.write_pieces(step, pieces, rank=self._rank, life=self._life)
            if self._rank == 0:
                self._store.complete(
                    step,
                    state,
                    life=self._life,
                    num_ranks=self._num_ranks,
                    timeout_s=self._timeout_s,
                )
                if self._on_saved is not None:
                    self._on_saved(step)
        except BaseException as error:  # noqa: BLE001 - it is raised again by whoever waits
            self._failure = error


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, in memory of its own."""
    return tensor.detach().to("cpu", copy=True).contiguous()
