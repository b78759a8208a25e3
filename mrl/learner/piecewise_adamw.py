"""AdamW that updates piece by piece, with moments in main memory, or moments and parameters in 16 bits, or both.

Parameters, gradients and their norm stay on the device, and so does the arithmetic: torch's own fused AdamW over ranges
of elements, in float32. So with float32 moments the parameters are, bit for bit, those that moments on the device
would give, however ranks shard them. Moments and parameters in bfloat16 are widened, updated, and rounded at random
(`stochastic_rounding`); gradients are float32 in any case.

With moments in main memory an update moves 16 bytes for each trained parameter of the rank, or 8 where they are
bfloat16: two moments to the device, and back. On a GPU the next piece comes while the last one leaves, and both use
page-locked memory, which copies several times as fast.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from mrl.learner.stochastic_rounding import rounding_bits, rounding_key, to_bfloat16
from mrl.models.device_memory import lock_pages
from mrl.weights.tensor_pieces import held_piece

PIECE_ELEMENTS, CPU_PIECE_ELEMENTS = 1 << 23, 1 << 18
"""Elements of a piece on a GPU, and on a CPU, whose caches are to hold it. Powers of two, so that no vector of a CPU is
cut."""
OF_PARAMETERS = 1
"""Part of the key of the parameters' random bits, so that these differ from those of their moments."""
VISITORS = 2
"""Pieces whose moments are on the device at once, 64 MiB each: one comes while the other leaves."""


class PiecewiseAdamW(AdamW):
    """Takes the place of AdamW; the moments of all parameters are there, as zeros, from the start.

    Saved moments are to be copied into them: `load_state_dict` would take them to the device.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        on_host: bool,
        dtype: torch.dtype = torch.float32,
        piece_elements: int = 0,
    ) -> None:
        """Moments have `dtype`, float32 or bfloat16, and lie in main memory or beside their parameters.

        `piece_elements` 0 takes the size that suits the device.
        """
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        self._piece_elements, self._on_host, self._dtype = piece_elements, on_host, dtype
        for group in self.param_groups:
            for parameter in group["params"]:
                at = torch.device("cpu") if on_host else parameter.device
                moments = {
                    key: torch.zeros_like(parameter, dtype=dtype, device=at) for key in ("exp_avg", "exp_avg_sq")
                }
                self.state[parameter] = {"step": torch.zeros(()), **moments}

        visiting = [state for one, state in self.state.items() if on_host and one.device.type == "cuda"]
        lock_pages([_elements(moment) for state in visiting for moment in _moments(state)], holder=self)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; a closure is not called."""
        trained = [
            (number, parameter, group)
            for group in self.param_groups
            for number, parameter in enumerate(group["params"])
            if parameter.grad is not None
        ]
        visits = self._visits([parameter for _, parameter, _ in trained])
        for number, parameter, group in trained:
            rounds = torch.bfloat16 in (self._dtype, parameter.dtype)
            state, first = self.state[parameter], _first_element(parameter) if rounds else 0
            held = (_elements(one) for one in (parameter, parameter.grad, *_moments(state)))
            at_once = self._piece_size(parameter)
            for weights_E, gradient_E, *moments_E in zip(*(one.split(at_once) for one in held), strict=True):
                visits.update(_Piece(weights_E, gradient_E, moments_E, state["step"], group, number, first))
                first += len(weights_E)
            state["step"] += 1
        visits.end()

    def _piece_size(self, parameter: Tensor) -> int:
        return self._piece_elements or (CPU_PIECE_ELEMENTS if parameter.device.type == "cpu" else PIECE_ELEMENTS)

    def _visits(self, trained: list[Tensor]) -> "_Visits":
        devices = {parameter.device for parameter in trained}
        if not self._on_host:
            return _InPlace()
        if not torch.cuda.is_available() or {device.type for device in devices} != {"cuda"}:
            return _Visits()
        (device,) = devices
        largest = min(self._piece_size(trained[0]), max(_elements(one).numel() for one in trained))
        return _VisitsToGpu(device, largest, self._dtype)


@dataclass(frozen=True, slots=True)
class _Piece:
    """E elements of a parameter, from its element `first` on, with their gradient and moments."""

    weights_E: Tensor
    gradient_E: Tensor
    moments_E: list[Tensor]
    step: Tensor
    group: dict[str, Any]
    parameter: int
    """Number of the parameter, the same on every rank and after a resume."""
    first: int


class _Visits:
    """Updates pieces one after the other."""

    def update(self, piece: _Piece) -> None:
        """Update a piece by torch's fused kernel; its moments come to the device and leave it again."""
        device = piece.weights_E.device
        visiting_E = [moment_E.to(device, copy=True) for moment_E in piece.moments_E]
        _update(piece, visiting_E, step=piece.step.to(device, copy=True))
        for moment_E, visitor_E in zip(piece.moments_E, visiting_E, strict=True):
            moment_E.copy_(visitor_E)

    def end(self) -> None:
        """Return once all moments are back where they were."""


class _InPlace(_Visits):
    """Updates pieces whose moments are on the device already."""

    def update(self, piece: _Piece) -> None:
        _update(piece, piece.moments_E, step=piece.step.to(piece.weights_E.device, copy=True))


class _VisitsToGpu(_Visits):
    """Updates pieces on a GPU; copies run beside the arithmetic, in both directions at once."""

    def __init__(self, device: torch.device, piece_elements: int, dtype: torch.dtype) -> None:
        self._main = torch.cuda.current_stream(device)
        self._coming, self._leaving = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._places = [_Place(device, piece_elements, dtype) for _ in range(VISITORS)]
        self._coming.wait_stream(self._main)  # the places are memory of that stream

    def update(self, piece: _Piece) -> None:
        place = self._places.pop(0)
        self._places.append(place)
        visiting_E = [moment_M[: len(piece.weights_E)] for moment_M in place.moments_M]
        with torch.cuda.stream(self._coming):
            self._coming.wait_event(place.left)
            for moment_E, visitor_E in zip(piece.moments_E, visiting_E, strict=True):
                visitor_E.copy_(moment_E, non_blocking=True)
            place.came.record()
        self._main.wait_event(place.came)
        _update(piece, visiting_E, step=torch.full_like(piece.step, float(piece.step), device=piece.weights_E.device))
        place.updated.record(self._main)
        with torch.cuda.stream(self._leaving):
            self._leaving.wait_event(place.updated)
            for moment_E, visitor_E in zip(piece.moments_E, visiting_E, strict=True):
                moment_E.copy_(visitor_E, non_blocking=True)
            place.left.record()

    def end(self) -> None:
        self._leaving.synchronize()


class _Place:
    """Memory on a GPU for both moments of a piece of at most M elements."""

    def __init__(self, device: torch.device, piece_elements: int, dtype: torch.dtype) -> None:
        self.moments_M = [torch.empty(piece_elements, dtype=dtype, device=device) for _ in range(2)]
        self.came, self.updated, self.left = (torch.cuda.Event() for _ in range(3))


def _update(piece: _Piece, moments_E: list[Tensor], *, step: Tensor) -> None:
    """Update a piece in float32; values that are kept in 16 bits are rounded at random."""
    group = piece.group
    weights_E, mean_E, square_E = (held_E.float() for held_E in (piece.weights_E, *moments_E))
    adamw(
        [weights_E],
        [piece.gradient_E],
        [mean_E],
        [square_E],
        [],
        [step],  # the kernel counts it up itself
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        fused=True,
    )
    # Float32 tensors were updated where they are.
    if piece.weights_E.dtype != torch.float32:
        piece.weights_E.copy_(to_bfloat16(weights_E, _bits(piece, OF_PARAMETERS)))
    if moments_E[0].dtype != torch.float32:
        bits_E = _bits(piece)
        moments_E[0].copy_(to_bfloat16(mean_E, bits_E))
        moments_E[1].copy_(to_bfloat16(square_E, bits_E >> 16))


def _bits(piece: _Piece, *of: int) -> Tensor:
    """Return random bits for the piece's elements, [E], the same in every layout of ranks and after every resume."""
    key = rounding_key(piece.parameter, int(piece.step), *of)
    return rounding_bits(len(piece.weights_E), first=piece.first, key=key, device=piece.weights_E.device)


def _moments(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return state["exp_avg"], state["exp_avg_sq"]


def _elements(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, flat, in the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)


def _first_element(parameter: Tensor) -> int:
    """Return the number, in the whole parameter, of the first element that this rank holds."""
    return held_piece(parameter, 0).first_row * math.prod(parameter.shape[1:])
