"""The protocol of a sharing regime, and the values that cross it.

Shapes: P prompt tokens, T answer tokens of one row; arrays are numpy, one row each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mrl.records.experience import ExperienceRecord, Received
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.cost import SharedRows

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

Objective = Literal["policy_gradient", "imitation"]
DenominatorKind = Literal["rows", "tokens", "prompts", "constant"]

SUCCESS_REWARD = 1.0
"""An answer is a success when its reward is at least this."""


@dataclass(frozen=True, slots=True)
class Component:
    """One summand of the loss: which term its tokens get, its coefficient, and what its denominator counts.

    "rows", "tokens" and "prompts" count those of the component in the whole batch; "constant" is a number that does not
    depend on the component's rows. `Absorbed.denominators` holds the value.
    """

    name: str
    objective: Objective
    coefficient: float
    denominator: DenominatorKind


@dataclass(frozen=True, slots=True, eq=False)
class TrainingExample:
    """One row of a batch with its credit; token ids are the receiver's own.

    Example, a rescue of 3 tokens: answer_token_ids [17, 4, 2], advantages [0, 0, 0], weights [1/3, 1/3, 1/3],
    behaviour_logprobs None, component "rescue".
    """

    prompt_token_ids: Int32s
    """[P], never trained on."""
    answer_token_ids: Int32s
    """[T], the closing EOS included when the answer was finished."""
    component: str
    advantages: Float32s
    """[T], used by policy_gradient components only."""
    weights: Float32s
    """[T], multiplies the per-token term."""
    behaviour_logprobs: Float32s | None
    """[T] of the policy that sampled the row, or None where no ratio is formed."""
    prompt_id: str
    source: str
    """The policy that wrote the answer."""
    phase: int = 0
    """Rows of a lower phase are trained before rows of a higher one, for regimes that order minibatches."""


@dataclass(frozen=True, slots=True)
class Rescue:
    """A peer's answer that was trained on for a prompt where the own group failed; for samples and reports."""

    prompt_id: str
    source: str
    completion: bytes


@dataclass(frozen=True, slots=True)
class Absorbed:
    """What one batch becomes.

    `denominators` has one entry per component of the regime: the number that divides the component's sum over the whole
    batch. `absorb` sees the whole batch of a step (all ranks), so the numbers are final before the first backward. They
    count what the component's `denominator` names, and they include rows that were left out of `examples` because their
    advantages are all exactly zero: such a row adds 0 to the sum and 1 to the count. An entry is never 0: that of a
    component without rows is 1. A learner that splits the batch into M minibatches divides each denominator by M.
    """

    examples: list[TrainingExample]
    denominators: dict[str, float]
    forget: list[str]
    """Prompt ids that are no longer awaited; the caller stops watching them."""
    counts: dict[str, float]
    """Metric name -> value of this step."""
    rescued: list[Rescue]
    shared: Sequence[SharedRows] = ()
    """Peer answers among `examples`, aligned, so that the learner can say what they cost."""


@dataclass(frozen=True, slots=True)
class Author:
    """Who publishes: the tags of every record that a worker writes."""

    policy: str
    fingerprint: str
    verifier: str
    make_id: Callable[[], str]
    """A new record id on every call; ids that follow from ticket and index make resends recognisable."""
    now_unix_s: float


@dataclass(frozen=True, slots=True)
class Asking:
    """How a regime asks the exchange for the prompts that `asks` names."""

    limit: int
    """Records per prompt at most."""
    max_age_versions: int | None
    """Oldest age that is still of use; None takes any."""
    watch: bool
    """Whether to be told of later successes until the prompt is forgotten."""


class Regime(Protocol):
    """One way to share. Workers call `publish`; the learner calls the rest, from one thread.

    Order at the learner: `asks` once for every own group when it arrives (also for groups that are dropped later), then
    `absorb` with the groups of a step and everything that was received since the last call. A checkpoint is taken
    between two calls.
    """

    @property
    def components(self) -> tuple[Component, ...]:
        """The summands of the loss."""
        ...

    @property
    def reads(self) -> frozenset[str]:
        """Record types that the regime reads; empty when it needs no exchange."""
        ...

    @property
    def asking(self) -> Asking | None:
        """How to fetch what `asks` names; None when the regime never asks."""
        ...

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Records that this group gives to the peers; depends on nothing but its arguments."""
        ...

    def asks(self, group: ScoredGroup) -> list[str]:
        """Note an own group that has arrived; returns prompt ids to ask the peers for."""
        ...

    def awaited(self) -> list[str]:
        """Prompt ids that are awaited now; a resumed learner asks for them again."""
        ...

    def absorb(
        self, groups: Sequence[ScoredGroup], received: Sequence[Received], *, step: int, rng: np.random.Generator
    ) -> Absorbed:
        """Turn the own groups of `step` (the learner's current version step) and peer records into rows with credit."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        ...
