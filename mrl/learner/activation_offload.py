"""Inputs of checkpointed blocks that wait in main memory, from the forward pass of their block to its backward pass.

What a block keeps under activation checkpointing is its input alone. From a GPU these inputs are copied to locked main
memory beside the arithmetic, and come back one block before they are needed. Values are copied and never computed with,
so the bits are those of a pass that keeps them. On a CPU the same hooks copy within main memory, which saves nothing.

On a GPU all that is read or written is memory of the stream that computes, and that stream waits for a copy before it
takes or frees what is copied: so the allocator may give freed memory to the next block at once.
"""

import weakref
from collections import deque

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

PIECE_BYTES = 1 << 25
"""torch takes a power of two of bytes wherever it locks memory: in pieces of one, little is lost, and passes of other
lengths use the same pieces again."""
LEAVING = 2
"""Inputs on their way to main memory, which are still on the device; the block after waits for the oldest of them."""


def locked_bytes(size: int) -> int:
    """What is taken of main memory for an input of so many bytes."""
    whole, rest = divmod(size, PIECE_BYTES)
    return whole * PIECE_BYTES + (1 << (rest - 1).bit_length() if rest else 0)


class OffloadedInputs:
    """Of all blocks of a model, in the order of their forward passes; `host` is where they wait."""

    def __init__(self, host: torch.device | None = None) -> None:
        self._host = host or torch.device("cpu")
        self._newest: weakref.ref[_Waiting] | None = None
        self._to_gpu: _GpuCopies | None = None

    def hooks(self) -> saved_tensors_hooks:
        """What is saved for backward inside of this context, on this thread, waits in main memory."""
        return saved_tensors_hooks(self._leave, self._come_back)

    def _leave(self, tensor: Tensor) -> "_Waiting":
        before = self._newest() if self._newest is not None else None
        if tensor.device.type == "cuda":
            self._to_gpu = self._to_gpu or _GpuCopies(tensor.device)
            waiting: _Waiting = _WaitingForGpu(tensor, self._to_gpu, before)
        else:
            waiting = _Waiting(tensor, self._host)
        self._newest = weakref.ref(waiting)
        return waiting

    def _come_back(self, waiting: "_Waiting") -> Tensor:
        self._newest = None  # a backward pass has begun, and the next input is the first of another pass
        return waiting.come_back()


class _Waiting:
    """One input, copied there and back at once."""

    def __init__(self, tensor: Tensor, host: torch.device) -> None:
        self._device, self._kept = tensor.device, tensor.detach().to(host, copy=True)

    def come_back(self) -> Tensor:
        """On its device again."""
        return self._kept.to(self._device, copy=True)


class _WaitingForGpu(_Waiting):
    """Copied beside the arithmetic. The input that left before it is fetched when this one is used."""

    def __init__(self, tensor: Tensor, copies: "_GpuCopies", before: _Waiting | None) -> None:
        self._copies, self._before = copies, weakref.ref(before) if before is not None else None
        self._device, self._shape = tensor.device, tensor.shape
        self._pieces = copies.away(tensor.detach().contiguous().view(-1))
        self._fetched: tuple[Tensor, torch.cuda.Event] | None = None

    def come_back(self) -> Tensor:
        self.fetch()
        assert self._fetched is not None
        (flat, came), self._fetched = self._fetched, None
        torch.cuda.current_stream(self._device).wait_event(came)
        before = self._before() if self._before is not None else None
        if isinstance(before, _WaitingForGpu):
            before.fetch()
        return flat.view(self._shape)

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._fetched is None:
            self._fetched = self._copies.back(self._pieces, self._device)


class _GpuCopies:
    """A stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._beside = torch.cuda.Stream(device)
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def away(self, flat: Tensor) -> list[Tensor]:
        """Pieces in locked main memory, once what the stream that computes has to do is done."""
        computing = torch.cuda.current_stream(flat.device)
        self._free(LEAVING - 1, computing)
        pieces = flat.split(PIECE_BYTES // flat.element_size())
        kept = [torch.empty(len(piece), dtype=flat.dtype, pin_memory=True) for piece in pieces]
        self._beside.wait_stream(computing)
        with torch.cuda.stream(self._beside):
            for there, piece in zip(kept, pieces, strict=True):
                there.copy_(piece, non_blocking=True)
            self._leaving.append((flat, self._beside.record_event()))
        return kept

    def back(self, kept: list[Tensor], device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
        """On the device in one row, once the event has come to pass."""
        computing = torch.cuda.current_stream(device)
        self._free(0, computing)
        flat = torch.empty(sum(map(len, kept)), dtype=kept[0].dtype, device=device)
        self._beside.wait_stream(computing)  # which may still use what lay in this memory
        with torch.cuda.stream(self._beside):
            for piece, there in zip(flat.split(PIECE_BYTES // flat.element_size()), kept, strict=True):
                piece.copy_(there, non_blocking=True)
            return flat, self._beside.record_event()

    def _free(self, still_leaving: int, computing: torch.cuda.Stream) -> None:
        while len(self._leaving) > still_leaving:
            _, left = self._leaving.popleft()
            computing.wait_event(left)
