"""Per-token diagnostics of a step, summed over its updates and over all ranks."""

from collections.abc import Sequence

import torch

from mrl.learner.loss import TokenValues, needs_entropy, needs_reference, term_inputs
from mrl.learner.packing import PackedBatch
from mrl.learner.ranks.world import World
from mrl.objectives.diagnostics import clipped_tokens, k3_nats, sampled_entropy_nats
from mrl.objectives.ratios import bounded_ratio, row_sum
from mrl.objectives.specs import Filtered
from mrl.objectives.terms import filtered_tokens
from mrl.sharing.regime import Component

MEANS = ("entropy/sampled_nats", "ratio/clip_share", "mismatch/k3_nats", "kl/reference_nats", "entropy/policy_nats")


class TokenDiagnostics:
    """Means over the tokens of own rows. Rows of peers only enter the counts of trained tokens and filtered rows."""

    def __init__(self, components: Sequence[Component], world: World) -> None:
        self._own = [(index, c.term) for index, c in enumerate(components) if c.rows == "own"]
        self._filters = [(index, c.term) for index, c in enumerate(components) if isinstance(c.term, Filtered)]
        self._world = world
        absent = {
            "kl/reference_nats": not needs_reference(components),
            "entropy/policy_nats": not needs_entropy(components),
        }
        self._names = [name for name in MEANS if not absent.get(name)]
        self._trained = torch.zeros(2, device=world.device)
        self._sums = torch.zeros(len(MEANS), device=world.device)
        self._largest = torch.zeros(1, device=world.device)
        self._num_filtered = torch.zeros(1, device=world.device)

    @torch.no_grad()
    def add(self, batches: Sequence[PackedBatch], seen: Sequence[TokenValues], update_index: int) -> None:
        """Add the tokens of one update."""
        for batch, values in zip(batches, seen, strict=True):
            self._trained[1] += len(values.logprobs_T)
            for index, term in self._own:
                mine_T = batch.component_T == index
                inputs = term_inputs(values, batch, mine_T, update_index)
                nothing = torch.zeros(0, device=self._sums.device)
                columns = [
                    sampled_entropy_nats(inputs.behaviour_T),
                    clipped_tokens(term, inputs),
                    k3_nats(inputs.proximal_T, inputs.behaviour_T),
                    nothing if values.reference_T is None else k3_nats(values.reference_T[mine_T], inputs.logprobs_T),
                    nothing if values.entropy_T is None else values.entropy_T[mine_T],
                ]
                self._trained[0] += len(inputs.logprobs_T)
                self._sums += torch.stack([column.sum().to(self._sums) for column in columns])
                if len(inputs.proximal_T):
                    found = bounded_ratio(inputs.proximal_T, inputs.behaviour_T).max()
                    self._largest = torch.maximum(self._largest, found)
            for index, filter_ in self._filters:
                inputs = term_inputs(values, batch, batch.component_T == index, update_index)
                dropped_T = filtered_tokens(filter_, inputs).to(self._num_filtered)
                self._num_filtered += (dropped_T / row_sum(torch.ones_like(dropped_T), inputs.row_T)).sum()

    def values(self) -> dict[str, float]:
        """Return means over tokens, after summing over ranks."""
        own, trained = self._world.sum_values(self._trained).tolist()
        sums = dict(zip(MEANS, self._world.sum_values(self._sums).tolist(), strict=True))
        per_token = 1.0 / own if own else 0.0
        means = {name: sums[name] * per_token for name in self._names}
        if self._filters:
            means["sharing/filtered_rows"] = round(float(self._world.sum_values(self._num_filtered)), 3)
        return means | {
            "tokens/trained": trained,
            "mismatch/max_ratio": float(self._world.max_values(self._largest)),
        }
