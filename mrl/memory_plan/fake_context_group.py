"""Memory of the exchange around attention between ranks that share a pass's places, found without the other ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mrl.learner.ranks.context_group import ContextGroup


@dataclass(frozen=True, slots=True)
class FakeContextGroup(ContextGroup):
    """Context group that makes the tensors which a rank of `size` ranks makes for an exchange, and sends nothing.

    A pass given to it has the rank's places alone: rows are shorter in the same proportion as a rank has fewer heads of
    whole rows, so that attention in it takes the same memory.
    """

    group: Any = None
    rank: int = 0
    size: int = 1

    def own_places(self, values_L: Tensor, *, beyond: int = 0) -> Tensor:
        """Return all places."""
        return values_L

    def own_tokens(self, predict_at_T: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
        """Return all tokens."""
        return torch.arange(len(predict_at_T)), predict_at_T

    def of_all(self, values_t: Tensor, index_t: Tensor, num_tokens: int) -> Tensor:
        """Return the values as they are."""
        return values_t

    def by_heads(self, states_lHD: Tensor, num_places: int) -> Tensor:
        """Return [l, H, D]; with fewer than C heads, C of them."""
        repeats = max(1, self.size // states_lHD.shape[1])
        parts = states_lHD.repeat_interleave(repeats, 1).unflatten(1, (self.size, -1)).transpose(0, 1)
        return self._exchange(parts).reshape(len(states_lHD), -1, states_lHD.shape[2])

    def by_places(self, states_LHD: Tensor) -> Tensor:
        """Return [l, H, D]."""
        filled = functional.pad(states_LHD, (0, 0, 0, 0, 0, 0))
        parts = filled.reshape(self.size, len(states_LHD), -1, states_LHD.shape[2])
        return self._exchange(parts).transpose(0, 1).flatten(1, 2)

    def _exchange(self, parts_C: Tensor) -> Tensor:
        made: Tensor = _Unsent.apply(parts_C)
        return made


class _Unsent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_C: Tensor) -> Tensor:
        return torch.empty_like(parts_C.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(gradients[0].contiguous())
