"""Passes whose tokens go to the experts that an engine chose for them (R3, arXiv 2510.11370).

For a token, a layer's router logits s and the chosen experts I give the gates

    g_i = I_i exp(s_i) / sum_j I_j exp(s_j)

as they do where the router chooses itself: only the choice is replaced, and gradients reach the router through the
gates. A family that does not divide by the sum over the chosen experts keeps exp(s_i) / sum over all experts.

Shapes: L places of a pass, N decoder layers, K chosen experts of a token in a layer, E experts of a layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mrl.models.routing.routers import RoutingShape, routers_of

OWN = -1
"""Stands in place of an expert's id where the router chooses for itself."""


class RouterReplay:
    """Lets the decoder of a model take `chosen_experts`, int16 [L, N, K]; without them, routers choose for themselves.

    In a layer, the experts of a place are replaced all together or, where they are `OWN`, not at all.
    """

    def __init__(self, model: nn.Module) -> None:
        """Change the model in place, before anything is put around its layers. Raises ModelFolderError."""
        self.shape: RoutingShape
        self.shape, routers = routers_of(model)
        self._routers = {index: _Router(router) for index, router in routers.items()}
        for index, layer in enumerate(model.get_decoder().layers):  # type: ignore[operator]
            # The innermost call: a layer that runs again in the backward pass gets the experts again.
            layer.forward = partial(_told, layer.forward, self._routers.get(index), index)

    def take_counts(self) -> tuple[float, float]:
        """Return two counts over passes with gradient since the last call: slots (token, layer, chosen expert) whose
        expert was given, and those of them whose expert the router would have given to no slot of the token.
        """
        told, other = (sum(pair) for pair in zip(*(one.take_counts() for one in self._routers.values()), strict=True))
        return told, other


def _told(
    forward: Callable[..., Any],
    router: "_Router | None",
    index: int,
    *arguments: Any,
    chosen_experts: Tensor | None = None,
    **keys: Any,
) -> Any:
    """Run one layer, whose router gets the chosen experts."""
    if router is not None:
        router.told_LK = None if chosen_experts is None else chosen_experts[:, index]
    return forward(*arguments, **keys)


class _Router:
    """Replacement of a router's own forward."""

    def __init__(self, router: Any) -> None:
        self.told_LK: Tensor | None = None
        self._own: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = router.forward
        self._divides = bool(getattr(router, "norm_topk_prob", True))
        self._counts: Tensor | None = None
        router.forward = self._forward

    def take_counts(self) -> tuple[float, float]:
        told, other = (0.0, 0.0) if self._counts is None else self._counts.tolist()
        self._counts = None
        return told, other

    def _forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_LE, gates_LK, own_LK = self._own(hidden)
        if self.told_LK is None:
            return logits_LE, gates_LK, own_LK
        told_LK = self.told_LK.long()
        is_told_L1 = told_LK[:, :1] != OWN
        chosen_LK = torch.where(is_told_L1, told_LK, own_LK)
        if torch.is_grad_enabled():
            self._count(is_told_L1, chosen_LK, own_LK)
        taken_LK = logits_LE.softmax(-1, dtype=torch.float).gather(-1, chosen_LK)
        if self._divides:
            taken_LK = taken_LK / taken_LK.sum(-1, keepdim=True)
        return logits_LE, taken_LK.to(gates_LK.dtype), chosen_LK

    @torch.no_grad()
    def _count(self, is_told_L1: Tensor, chosen_LK: Tensor, own_LK: Tensor) -> None:
        is_own_LK = (chosen_LK[:, :, None] == own_LK[:, None, :]).any(-1)
        counts = torch.stack([is_told_L1.sum() * own_LK.shape[1], (is_told_L1 & ~is_own_LK).sum()]).double()
        self._counts = counts if self._counts is None else self._counts + counts
