"""What a policy gives to the peer answers that it imitates: their log-probs, read off the training pass itself."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.learner.order import StepOrder
from mrl.learner.packing import PackedBatch
from mrl.learner.world import World
from mrl.sharing.regime import Component

Float32s = npt.NDArray[np.float32]


class ImitatedLogprobs:
    """Log-probs of the rows of imitation components, gathered over minibatches and ranks.

    A row is read when its turn comes: with several minibatches, after the updates before it.
    """

    def __init__(self, order: StepOrder, components: Sequence[Component], world: World) -> None:
        imitated = {component.name for component in components if component.objective == "imitation"}
        self._world = world
        self._places = {id(example): place for place, example in enumerate(order.examples)}
        sizes = {p: e.answer_token_ids.size for p, e in enumerate(order.examples) if e.component in imitated}
        starts = np.cumsum([0, *sizes.values()]).tolist()
        self._parts = {place: slice(*starts[n : n + 2]) for n, place in enumerate(sizes)}
        self._flat = torch.zeros(starts[-1], device=world.device)

    @torch.no_grad()
    def add(self, part: StepOrder, batches: Sequence[PackedBatch], logprobs: Sequence[Tensor]) -> None:
        """Take the rows of one minibatch that this rank holds."""
        places = [self._places[id(example)] for example in part.examples]
        for batch, logprobs_T in zip(batches, logprobs, strict=True):
            for row, place in enumerate(places):
                if place in self._parts and len(mine := logprobs_T[batch.row_T == row]):
                    self._flat[self._parts[place]] = mine

    def values(self) -> dict[int, Float32s]:
        """Place in the order's examples -> [T] log-probs, the same on every rank."""
        if not self._parts:
            return {}
        flat = self._world.sum_values(self._flat).cpu().numpy()
        return {place: flat[part] for place, part in self._parts.items()}
