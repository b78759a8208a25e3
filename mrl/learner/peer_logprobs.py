"""A policy's own log-probabilities of answers that peers wrote or scored, taken from the training pass itself."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.learner.packing import PackedBatch
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.sharing.regime import Component

Float32s = npt.NDArray[np.float32]


class PeerLogprobs:
    """Own log-probabilities of peers' rows, and of own rows with a teacher, gathered over minibatches and ranks.

    They are taken as each row is trained on: with several minibatches, after the updates before it.
    """

    def __init__(self, order: StepOrder, components: Sequence[Component], world: World) -> None:
        of_peers = {component.name for component in components if component.rows == "peer"}
        self._world = world
        sizes = {
            place: example.num_trained_tokens
            for place, example in enumerate(order.examples)
            if example.component in of_peers or example.teacher_logprobs is not None
        }
        starts = np.cumsum([0, *sizes.values()]).tolist()
        self._parts = {place: slice(*starts[n : n + 2]) for n, place in enumerate(sizes)}
        self._start_of = {id(order.examples[place]): part.start for place, part in self._parts.items()}
        self._flat = torch.zeros(starts[-1], device=world.device)

    @torch.no_grad()
    def add(self, part: StepOrder, batches: Sequence[PackedBatch], logprobs: Sequence[Tensor]) -> None:
        """Take in the rows of one minibatch that this rank holds."""
        if not self._parts:
            return
        starts = [self._start_of.get(id(example), -1) for example in part.examples]
        starts_R = torch.tensor(starts, dtype=torch.int64, device=self._flat.device)
        for batch, logprobs_T in zip(batches, logprobs, strict=True):
            start_T = starts_R[batch.row_T]
            place_T = start_T + _places_in_row(batch.row_T)
            self._flat[place_T[start_T >= 0]] = logprobs_T[start_T >= 0]

    def values(self) -> dict[int, Float32s]:
        """Return place in the order's examples -> [T] log-probabilities, the same on every rank."""
        if not self._parts:
            return {}
        flat = self._world.sum_values(self._flat).cpu().numpy()
        return {place: flat[part] for place, part in self._parts.items()}


def _places_in_row(row_T: Tensor) -> Tensor:
    """Return how many tokens of its row stand before each token, [T]; the tokens of a packed row stand together."""
    index_T = torch.arange(len(row_T), device=row_T.device)
    opens_T = torch.ones_like(row_T, dtype=torch.bool)
    opens_T[1:] = row_T[1:] != row_T[:-1]
    return index_T - torch.where(opens_T, index_T, 0).cummax(0).values
