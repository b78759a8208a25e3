"""Record of the experts that the routers of a model chose in its last pass."""

import threading
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mrl.models.routing.routers import RoutingShape, routers_of
from mrl.records.chosen_experts import Experts


class RouterRecord:
    """Record of every pass of one model, for as long as the model lives. Each thread sees its own passes alone."""

    def __init__(self, model: nn.Module) -> None:
        """Hook into the routers of `model`. Raises ModelFolderError as `routers_of`."""
        self.shape: RoutingShape
        self.shape, routers = routers_of(model)
        self._own = threading.local()
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._see, layer))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the ids: the smallest that holds the number of experts."""
        return np.dtype(np.uint8 if self.shape.num_experts <= 256 else np.uint16)

    def last(self) -> Experts:
        """Return [R, X] ids of the experts chosen at the R places of the last pass, in their order; 0 in layers without
        a router.
        """
        chosen: dict[int, Tensor] = self._own.chosen
        any_RK = next(iter(chosen.values()))
        parts = [chosen.get(layer, torch.zeros_like(any_RK)) for layer in range(self.shape.num_layers)]
        return torch.cat(parts, 1).cpu().numpy().astype(self.dtype)

    def last_of_rows(self, num_rows: int) -> npt.NDArray[Any]:
        """Return [rows, R / rows, X] the ids of `last`, of a pass over a batch of `num_rows` rows."""
        return self.last().reshape(num_rows, -1, self.shape.num_slots)

    def _see(self, layer: int, router: nn.Module, given: Any, result: tuple[Tensor, Tensor, Tensor]) -> None:
        if not hasattr(self._own, "chosen"):
            self._own.chosen = {}
        self._own.chosen[layer] = result[2]
