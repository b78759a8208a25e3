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

LEAVING = 2
"""Inputs on their way to main memory, which are still on the device; the block after waits for the oldest of them."""


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
        self.device, self.kept = tensor.device, tensor.detach().to(host, copy=True)

    def come_back(self) -> Tensor:
        """On its device again."""
        return self.kept.to(self.device, copy=True)


class _WaitingForGpu(_Waiting):
    """Copied beside the arithmetic. The input that left before it is fetched when this one is used."""

    def __init__(self, tensor: Tensor, copies: "_GpuCopies", before: _Waiting | None) -> None:
        self._copies, self._before = copies, weakref.ref(before) if before is not None else None
        self._fetched: tuple[Tensor, torch.cuda.Event] | None = None
        self.device, self.kept = tensor.device, copies.away(tensor.detach())

    def come_back(self) -> Tensor:
        self.fetch()
        assert self._fetched is not None
        (tensor, came), self._fetched = self._fetched, None
        torch.cuda.current_stream(self.device).wait_event(came)
        before = self._before() if self._before is not None else None
        if isinstance(before, _WaitingForGpu):
            before.fetch()
        return tensor

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._fetched is None:
            self._fetched = self._copies.back(self.kept, self.device)


class _GpuCopies:
    """A stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._beside = torch.cuda.Stream(device)
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def away(self, tensor: Tensor) -> Tensor:
        """In locked main memory, once what the stream has to do is done."""
        computing = torch.cuda.current_stream(tensor.device)
        self._free(LEAVING - 1, computing)
        kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._beside.wait_stream(computing)
        with torch.cuda.stream(self._beside):
            kept.copy_(tensor, non_blocking=True)
            self._leaving.append((tensor, self._beside.record_event()))
        return kept

    def back(self, kept: Tensor, device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
        """On the device, once the event has come to pass."""
        computing = torch.cuda.current_stream(device)
        self._free(0, computing)
        tensor = torch.empty_like(kept, device=device)
        self._beside.wait_stream(computing)  # which may still use what lay in this memory
        with torch.cuda.stream(self._beside):
            tensor.copy_(kept, non_blocking=True)
            return tensor, self._beside.record_event()

    def _free(self, still_leaving: int, computing: torch.cuda.Stream) -> None:
        while len(self._leaving) > still_leaving:
            _, left = self._leaving.popleft()
            computing.wait_event(left)
