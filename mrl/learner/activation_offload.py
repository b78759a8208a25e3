"""Inputs of checkpointed blocks that wait in main memory, from the forward pass of their block to its backward pass.

Under activation checkpointing a block keeps only its input. From a GPU these inputs are copied to locked main memory
beside the arithmetic, and come back one block before they are needed. Values are copied and never computed with, so the
bits are those of a pass that keeps them. On a CPU the same hooks copy within main memory, which saves nothing.

On a GPU all copies read or write memory of the stream that computes. That stream waits for a copy before it uses or
frees the copied tensor: so the allocator may give freed memory to the next block at once.
"""

import weakref
from collections import deque

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

PIECE_BYTES = 1 << 25
"""Bytes of a piece of locked memory. torch locks powers of two of bytes: with pieces of such a size little is lost, and
passes of other lengths use the same pieces again."""
LEAVING = 2
"""Most inputs on their way to main memory, which are still on the device; a further one waits for the oldest."""


def locked_bytes(size: int) -> int:
    """Return the bytes of main memory that an input of `size` bytes takes."""
    whole, rest = divmod(size, PIECE_BYTES)
    return whole * PIECE_BYTES + (1 << (rest - 1).bit_length() if rest else 0)


class OffloadedInputs:
    """Offloaded inputs of all blocks of a model, in the order of their forward passes; they wait on `host`."""

    def __init__(self, host: torch.device | None = None) -> None:
        self._host = host or torch.device("cpu")
        self._newest: weakref.ref[_Waiting] | None = None
        self._to_gpu: _GpuCopies | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which tensors that this thread saves for the backward pass wait in main memory."""
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
    """One offloaded input, copied to the host and back at once."""

    def __init__(self, tensor: Tensor, host: torch.device) -> None:
        self._device, self._kept = tensor.device, tensor.detach().to(host, copy=True)

    def come_back(self) -> Tensor:
        """Return the input on its device."""
        return self._kept.to(self._device, copy=True)


class _WaitingForGpu(_Waiting):
    """One offloaded input of a GPU, copied beside the arithmetic. Its return begins that of the input before it."""

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
        """Begin to copy the input back, where that has not begun."""
        if self._fetched is None:
            self._fetched = self._copies.back(self._pieces, self._device)


class _GpuCopies:
    """Copies between a GPU and main memory, on a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._beside = torch.cuda.Stream(device)
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def away(self, flat: Tensor) -> list[Tensor]:
        """Begin to copy a flat tensor, behind the work of the computing stream; return pieces in locked main memory."""
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
        """Begin to copy pieces back; return the flat tensor on the device, and the event that says that it is whole."""
        computing = torch.cuda.current_stream(device)
        self._free(0, computing)
        flat = torch.empty(sum(map(len, kept)), dtype=kept[0].dtype, device=device)
        self._beside.wait_stream(computing)  # it may still use what lay in this memory
        with torch.cuda.stream(self._beside):
            for piece, there in zip(flat.split(PIECE_BYTES // flat.element_size()), kept, strict=True):
                piece.copy_(there, non_blocking=True)
            return flat, self._beside.record_event()

    def _free(self, still_leaving: int, computing: torch.cuda.Stream) -> None:
        while len(self._leaving) > still_leaving:
            _, left = self._leaving.popleft()
            computing.wait_event(left)
