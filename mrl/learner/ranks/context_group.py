"""Ranks that share the places of each pass: context parallelism (DeepSpeed-Ulysses, arXiv 2309.14509).

Every rank of a group of C holds L / C neighbouring places of a pass of L, and computes for these alone all that a model
does place by place. Attention needs whole rows, so around it places are exchanged for heads: each rank attends with
H / C heads over all places, and gets its own places back with all heads. Values of answer tokens are summed over the
group, so that every rank of it has the whole rows that terms and spans need.

Shapes: l = ceil(L / C) places of a rank; the last ones of the last rank may belong to no row.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mrl.learner.ranks.world import World


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """This rank among the C neighbouring ranks that share the places of each pass."""

    group: dist.ProcessGroup
    rank: int
    """Number within the group."""
    size: int
    """C."""

    def own_places(self, values_L: Tensor, *, beyond: int = 0) -> Tensor:
        """Return the values of this rank's places, [l, ...]; places beyond L have the value `beyond`."""
        num_own = self._num_own(len(values_L))
        missing = num_own * self.size - len(values_L)
        filled = functional.pad(values_L, (0, 0) * (values_L.ndim - 1) + (0, missing), value=beyond)
        return filled[self.rank * num_own : (self.rank + 1) * num_own]

    def own_tokens(self, predict_at_T: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
        """Return the answer tokens that this rank's places predict: indices among T, [t], and places among l, [t]."""
        num_own = self._num_own(num_places)
        index_t = (predict_at_T // num_own == self.rank).nonzero().squeeze(1)
        return index_t, predict_at_T[index_t] - self.rank * num_own

    def of_all(self, values_t: Tensor, index_t: Tensor, num_tokens: int) -> Tensor:
        """Return the values of all ranks' tokens, [T, ...]; the gradient of each goes to the rank that computed it."""
        found: Tensor = _OfAll.apply(values_t, index_t, num_tokens, self.group)
        return found

    def by_heads(self, states_lHD: Tensor, num_places: int) -> Tensor:
        """Return all places with this rank's share of H heads, [L, H / C, D]; fewer than C heads are repeated."""
        repeats = max(1, self.size // states_lHD.shape[1])
        parts = states_lHD.repeat_interleave(repeats, 1).unflatten(1, (self.size, -1)).transpose(0, 1)
        return self._exchange(parts).flatten(0, 1)[:num_places]

    def by_places(self, states_LHD: Tensor) -> Tensor:
        """Return this rank's places with the heads of all ranks, [l, H, D], from [L, H / C, D]."""
        num_own = self._num_own(len(states_LHD))
        filled = functional.pad(states_LHD, (0, 0, 0, 0, 0, num_own * self.size - len(states_LHD)))
        return self._exchange(filled.unflatten(0, (self.size, num_own))).transpose(0, 1).flatten(1, 2)

    def _num_own(self, num_places: int) -> int:
        return -(-num_places // self.size)

    def _exchange(self, parts_C: Tensor) -> Tensor:
        exchanged: Tensor = _Exchanged.apply(parts_C, self.group)
        return exchanged


def context_group(world: World, size: int) -> ContextGroup | None:
    """Return the group of this rank; None where every rank has passes of its own. All ranks of a learner call it."""
    if size == 1:
        return None
    groups = [
        dist.new_group([*range(first, first + size)], timeout=world.patience) for first in range(0, world.size, size)
    ]
    return ContextGroup(groups[world.rank // size], world.rank % size, size)


class _Exchanged(torch.autograd.Function):
    """Sends part c of every rank to rank c; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, parts_C: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts_C, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


class _OfAll(torch.autograd.Function):
    """Sums the ranks' values. Every rank takes the same loss of all T values, and gets the gradient of its own ones."""

    @staticmethod
    def forward(ctx: Any, values_t: Tensor, index_t: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(index_t)
        all_T = values_t.new_zeros(num_tokens, *values_t.shape[1:]).index_copy(0, index_t, values_t)
        dist.all_reduce(all_T, group=group)
        return all_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (index_t,) = ctx.saved_tensors
        return gradients[0][index_t], None, None, None


def _all_to_all(parts_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = parts_C.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
