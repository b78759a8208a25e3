"""The routers of a mixture of experts, of families whose gates are a softmax over the chosen experts."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from mrl.errors import ModelFolderError
from mrl.records.chosen_experts import Experts

ROUTERS = ("Qwen3MoeTopKRouter", "MixtralTopKRouter")
"""Classes of transformers: hidden states -> (scores of all experts, gates of the chosen ones, their ids)."""


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Numbers that say which choices of experts are possible: K of E experts in each of N decoder layers; ids of layers
    without a router do not count.
    """

    num_layers: int
    top_k: int
    num_experts: int
    layers: tuple[int, ...]
    """Indices of the layers that have a router."""

    @property
    def num_slots(self) -> int:
        """X = N * K, the chosen experts of one token."""
        return self.num_layers * self.top_k

    def fits(self, experts_RX: Experts, num_rows: int) -> bool:
        """Whether routers of this shape can have chosen these experts at `num_rows` places: K different experts in each
        layer.
        """
        if experts_RX.shape != (num_rows, self.num_slots) or int(experts_RX.max(initial=0)) >= self.num_experts:
            return False
        ids_RNK = experts_RX.reshape(num_rows, self.num_layers, self.top_k)[:, self.layers]
        return not any((one == other).any() for one, other in itertools.combinations(np.moveaxis(ids_RNK, 2, 0), 2))


def routers_of(model: nn.Module) -> tuple[RoutingShape, dict[int, nn.Module]]:
    """Return the shape of a model's routers, and layer -> its router.

    Raises ModelFolderError for a model without experts, or with routers that work otherwise.
    """
    layers = model.get_decoder().layers  # type: ignore[operator]
    found = {
        index: module
        for index, layer in enumerate(layers)
        for module in layer.modules()
        if type(module).__name__ in ROUTERS
    }
    if not found:
        raise ModelFolderError(
            "learner.router_replay: this model type is not supported",
            got=model.config.model_type,  # type: ignore[union-attr]
            wanted="a mixture of experts of family qwen3_moe or mixtral",
            cure="remove learner.router_replay",
        )
    first: Any = next(iter(found.values()))
    return RoutingShape(len(layers), first.top_k, first.num_experts, tuple(found)), found
