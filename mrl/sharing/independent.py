"""No sharing: every policy trains on its own groups, by its own objective. The baseline of all regimes.

Reads of a peer: nothing. On the wire: 0 bytes per prompt. Costs: nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrl.config.table import Table
from mrl.records.experience import ExperienceRecord, Received
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_examples
from mrl.sharing.own_objective import POLICY_GRADIENT
from mrl.sharing.regime import AbsorbResult, Author, PeerQuery, PeerWait


class IndependentParameters(Table):
    """The `[sharing.independent]` table: there is nothing to set."""


class IndependentRegime:
    """Trains on own rows alone: publishes nothing and asks for nothing."""

    asking: PeerQuery | None = None
    patience: PeerWait | None = None

    def __init__(self, parameters: IndependentParameters, context: SharingContext) -> None:
        self.context = context
        self.components = (context.objective.component(),)

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Return no record: peers get nothing."""
        return []

    def asks(self, group: ScoredGroup) -> list[str]:
        """Return no prompt: peers are asked for nothing."""
        return []

    def awaited(self) -> list[str]:
        """Return no prompt."""
        return []

    def hear(self, received: Sequence[Received], *, step: int) -> None:
        """Drop the records: nothing was asked for."""

    def is_settled(self, group: ScoredGroup) -> bool:
        """Return true: nobody is waited for."""
        return True

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return own rows only."""
        own = own_examples(groups, self.context)
        return AbsorbResult(own.examples, {POLICY_GRADIENT: self.context.objective.denominator(own.lengths)})

    def state(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""
