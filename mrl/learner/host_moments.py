"""AdamW whose moments lie in main memory, and visit the device of their parameters piece by piece in an update.

Parameters, gradients and their norm stay on the device, and so does the arithmetic: torch's own fused AdamW over ranges
of elements. So the parameters are, bit for bit, those that moments on the device would give, however ranks share them
out. An update moves 16 bytes for each trained parameter of the rank: two moments there, and back.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

PIECE_ELEMENTS = 1 << 24
"""Elements whose moments are on the device at once: 128 MiB. A power of two, so that no vector of a CPU is cut."""


class HostMomentsAdamW(AdamW):
    """Takes its place; the moments of all parameters are there, as zeros, from the start.

    `load_state_dict` would take them to the device: they are to be filled where they are.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        piece_elements: int = PIECE_ELEMENTS,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        self._piece_elements = piece_elements
        for group in self.param_groups:
            for parameter in group["params"]:
                moments = {key: torch.zeros_like(parameter, device="cpu") for key in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": torch.zeros(()), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient; a closure is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        held = (_elements(one) for one in (parameter, gradient, state["exp_avg"], state["exp_avg_sq"]))
        for piece in zip(*(one.split(self._piece_elements) for one in held), strict=True):
            _update_piece(*piece, step=state["step"], group=group)
        state["step"] += 1


def _update_piece(
    weights_E: Tensor, gradient_E: Tensor, mean_E: Tensor, square_E: Tensor, *, step: Tensor, group: dict[str, Any]
) -> None:
    """torch's fused kernel on E elements of a parameter, whose moments come to their device and leave it again."""
    visiting_mean_E, visiting_square_E, visiting_step = (
        one.to(weights_E.device, copy=True) for one in (mean_E, square_E, step)
    )
    adamw(
        [weights_E],
        [gradient_E],
        [visiting_mean_E],
        [visiting_square_E],
        [],
        [visiting_step],  # which it counts itself
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        fused=True,
    )
    mean_E.copy_(visiting_mean_E)
    square_E.copy_(visiting_square_E)


def _elements(tensor: Tensor) -> Tensor:
    """What this rank holds of it, in one row that shares its memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)
