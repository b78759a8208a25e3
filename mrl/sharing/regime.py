"""The protocol of a sharing regime, and the values that cross it.

Shapes: P prompt tokens, T answer tokens of one row, S of them trained on: all but those that an environment gave in an
episode; arrays are numpy, of one row each.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.next_units import NextUnits
from mrl.errors import PluginError
from mrl.objectives.specs import Regularizer, Spreading, Term
from mrl.records.chosen_experts import Experts
from mrl.records.experience import ExperienceRecord, Received, RecordKind, SharedTurn
from mrl.records.rollouts import Continuation, ScoredGroup

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

DenominatorKind = Literal["rows", "tokens", "prompts", "constant"]


@dataclass(frozen=True, slots=True)
class Component:
    """One summand of the loss: the term of its tokens, its coefficient, and the unit that its denominator counts.

    "rows", "tokens" and "prompts" are counted over the batch, or over the component alone, as its regime says;
    "constant" counts every row as if it were as long as the token limit. `AbsorbResult.denominators` holds the value.
    """

    name: str
    term: Term
    coefficient: float
    denominator: DenominatorKind
    rows: Literal["own", "peer"]
    """Author of the answers: the policy itself, or a peer."""
    regularizer: Regularizer | None = None
    spreading: Spreading = "receiver_multiplicative"
    """Rule by which span log-probs in `behaviour_logprobs` and `teacher_logprobs` are divided over tokens."""


WITHHELD = "withheld"
"""Reason of an answer that cannot be used because its author sent the reward alone."""


@dataclass(frozen=True, slots=True, eq=False)
class ExaminedAnswer:
    """A peer's answer in own tokens, or an own answer that a peer has scored.

    The functions that read records make it, and give it to the recorder. A regime only passes it on, in the training
    example that it makes of the answer.
    """

    source: str
    """The policy that wrote the answer, or scored it."""
    prompt_id: str
    rejected: str = ""
    """Why the answer cannot be used; "" when it can."""
    trace_fault: str = ""
    """Why the source's log-probs are not believed, or are not there; "" when they are sound."""
    batch: AlignedBatch | None = None
    """Batch that holds the answer as row `row`; None for a rejected score."""
    row: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TrainingExample:
    """One row of a batch with its credit; token ids are the receiver's own.

    Example, a rescue of 3 tokens: answer_token_ids [17, 4, 2], advantages [0, 0, 0], weights [1/3, 1/3, 1/3],
    behaviour_logprobs None, component "rescue".
    """

    prompt_token_ids: Int32s
    """[P] ids of the prompt, never trained on."""
    answer_token_ids: Int32s
    """[T] ids of the answer, with the closing EOS of a finished answer unless the regime leaves it out."""
    component: str
    advantages: Float32s
    """[S] advantages; 0 where the component's term has none."""
    weights: Float32s
    """[S] factors of the per-token term."""
    behaviour_logprobs: Float32s | None
    """[S] log-probs under the policy that sampled the row; None where no ratio is formed. With `behaviour_spans` each
    token has the sum over its span."""
    prompt_id: str
    source: str
    """The policy that wrote the answer."""
    phase: int = 0
    """Rows of a lower phase are trained before rows of a higher phase, for regimes that order minibatches."""
    behaviour_spans: Int32s | None = None
    """[S] number of the common span of each token, from 0, never falling. The learner divides a span's log-prob over
    its tokens by its own log-probs, as the component's `spreading` says. None: every token is a span of its own."""
    teacher_logprobs: Float32s | None = None
    """[S] log-prob that a scoring peer gave the token's span; NaN, or None for the whole row, where it gave none."""
    teacher_spans: Int32s | None = None
    """[S] span of each token as in `behaviour_spans`, of the teacher's segmentation."""
    teacher_units: NextUnits | None = None
    """Units that a scoring peer finds likeliest in the place of each of the S tokens; None where it told none."""
    examined: ExaminedAnswer | None = None
    """The answer that the row's tokens, or its teacher's log-probs, come from. Only the recorder reads it, on the first
    rank; other ranks do not get it."""
    is_trained: Bools | None = None
    """[T] whether a token is trained on; the others are context alone. None: all are trained on."""
    row_starts: Int32s | None = None
    """[B] places in the answer from which on the policy read a new row, without the prompt and the tokens before the
    place. None: all is one row. The loss counts the answer as one row in any case."""
    experts: Experts | None = None
    """[S, X] experts to replay, as the routers of the sampling engine chose them (`mrl.records.chosen_experts`); None:
    none."""
    prompt_experts: Experts | None = None
    """[P - 1, X] experts to replay for the prompt's tokens but the last one."""

    @property
    def num_rows(self) -> int:
        """Rows that a model reads."""
        return 1 + (0 if self.row_starts is None else self.row_starts.size)

    @property
    def num_trained_tokens(self) -> int:
        """S, the trained tokens."""
        return self.weights.size

    @property
    def trained_token_ids(self) -> Int32s:
        """[S] ids of the trained tokens."""
        return self.answer_token_ids if self.is_trained is None else self.answer_token_ids[self.is_trained]


@dataclass(frozen=True, slots=True)
class Rescue:
    """A peer's answer that was trained on where the own group failed, as the run's samples show it."""

    prompt_id: str
    source: str
    completion: bytes
    reward: float
    prompt_token_ids: tuple[int, ...] = ()
    """[P] ids of the prompt, of an episode; else empty."""
    turns: tuple[SharedTurn, ...] = ()
    """Turns of an episode; else empty."""


@dataclass(frozen=True, slots=True)
class AbsorbResult:
    """Result of `absorb`: the training rows of one batch, with all that goes with them.

    `denominators` has one entry per component of the regime: the number that divides the component's sum over the whole
    batch. `absorb` sees the whole batch of a step (all ranks), so the numbers are final before the first backward. They
    count the unit that the component's `denominator` names. They include rows that were left out of `examples` because
    their advantages are all exactly zero: such a row adds 0 to the sum and 1 to the count. An entry is never 0, not
    even that of a component without rows. A learner that splits the batch into M minibatches divides each denominator
    by M.
    """

    examples: list[TrainingExample]
    denominators: dict[str, float]
    forget: Sequence[str] = ()
    """Prompt ids that are no longer awaited; the caller stops watching them."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Metric name -> value of this step."""
    rescued: Sequence[Rescue] = ()
    continuations: Sequence[Continuation] = ()
    """States that workers are to sample groups from. These groups arrive as own groups, and each replaces another
    one."""
    groups: Sequence[ScoredGroup] = ()
    """The own groups with their new rewards, where the regime has changed rewards; else empty."""
    expansion: float = 1.0
    """Optimizer updates of the step, as a multiple of the policy's minibatches: 2 for a batch twice as large."""


@dataclass(frozen=True, slots=True)
class Author:
    """The author of published records: the policy, and the fields that all records of its worker have."""

    policy: str
    fingerprint: str
    verifier: str
    make_id: Callable[[], str]
    """A new record id on every call; ids that follow from ticket and index make resends recognisable."""
    now_unix_s: float

    def tags(self, group: ScoredGroup) -> dict[str, Any]:
        """Return the fields that every record about a group carries, under a new record id."""
        return {
            "record_id": self.make_id(),
            "source": self.policy,
            "oldest": group.oldest,
            "newest": group.newest,
            "fingerprint": self.fingerprint,
            "prompt_id": group.prompt_id,
            "task": group.task,
            "created_unix_s": self.now_unix_s,
        }


@dataclass(frozen=True, slots=True)
class PeerQuery:
    """The question to the exchange about prompts that `asks` returns; they are watched until they are forgotten."""

    kinds: tuple[RecordKind, ...]
    """Record types that are of use."""
    limit: int
    """Records per prompt at most."""
    max_age_versions: int | None
    """Oldest age in versions that is still of use; None takes any."""
    scorer: str = ""
    """Names of the policies that are asked for scores, joined by commas; empty where nobody is."""


@dataclass(frozen=True, slots=True)
class PeerWait:
    """Bounds of an own group's wait for peers' records about its prompt: peers are optional.

    While enough groups are ready, groups that peers have answered are trained first. A group that is still awaited is
    passed over for `hold_versions` steps at most, inside the staleness bound. A batch that holds such a group waits
    `wait_s` at most.
    """

    hold_versions: int
    wait_s: float


class Regime(Protocol):
    """A sharing regime. Workers call `publish`; the learner calls the rest, from one thread.

    Order at the learner: `asks` once for every own group when it arrives (also for groups that are dropped later);
    `hear` for every record that was received; in between `is_settled`, to choose the groups of a step; then `absorb`
    with these groups. A checkpoint is taken between two calls.
    """

    @property
    def components(self) -> tuple[Component, ...]:
        """The summands of the loss."""
        ...

    @property
    def patience(self) -> PeerWait | None:
        """The bound of own groups' waits for peers. None for a regime whose groups never wait."""
        ...

    @property
    def asking(self) -> PeerQuery | None:
        """The question about the prompts that `asks` returns. None for a regime that never asks."""
        ...

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Return the records that this group gives to the peers. They depend on the arguments alone."""
        ...

    def asks(self, group: ScoredGroup) -> list[str]:
        """Note an own group that has arrived. Return the prompt ids to ask the peers for."""
        ...

    def awaited(self) -> list[str]:
        """Return the prompt ids that are awaited now. A resumed learner asks for them again."""
        ...

    def hear(self, received: Sequence[Received], *, step: int) -> None:
        """Note peer records at learner step `step`. The number of kept records has a bound, whatever arrives."""
        ...

    def is_settled(self, group: ScoredGroup) -> bool:
        """Whether this own group has nothing more to wait for."""
        ...

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Turn the own groups of `step` and the records that were heard into rows with credit.

        `step` is that of the learner's version. `rng` is the only source of chance.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold, as plain JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        ...


def lacks_of_regime(found: object) -> str:
    """Return the first part of `Regime` that a class or an object lacks, or has in another form; "" for none."""
    is_class = isinstance(found, type)
    if is_class and hasattr(found, "__getattr__"):  # its objects may have anything
        return ""
    for name, wanted in vars(Regime).items():
        if isinstance(wanted, property) and not is_class and not hasattr(found, name):
            return name
        if inspect.isfunction(wanted) and name[0] != "_" and not _is_called_alike(found, name, wanted):
            return f"{name}({', '.join(inspect.signature(wanted).parameters)})"
    return ""


def check_absorbed(absorbed: object, components: Sequence[Component]) -> None:
    """Raises PluginError for a result of `absorb` that a learner cannot train on; regimes of mrl never return one."""
    names = sorted(component.name for component in components)

    def refused(got: object, wanted: str) -> PluginError:
        return PluginError("the result of absorb cannot be trained on", where="sharing.regime", got=got, wanted=wanted)

    if not isinstance(absorbed, AbsorbResult):
        raise refused(absorbed, "a mrl.sharing.regime.Absorbed, as self.absorbed(...) returns it")
    if sorted(absorbed.denominators) != names or not all(value > 0 for value in absorbed.denominators.values()):
        raise refused(absorbed.denominators, f"denominators above 0, one for each component: {', '.join(names)}")
    if strangers := {row.component for row in absorbed.examples} - set(names):
        raise refused(f"a row of the component {min(strangers)}", f"rows of the components {', '.join(names)}")


def _is_called_alike(found: object, name: str, wanted: Callable[..., Any]) -> bool:
    own = getattr(found, name, None)
    if not callable(own):
        return False
    given = list(inspect.signature(wanted).parameters.values())
    if not isinstance(found, type):
        del given[0]  # the object, which is bound
    elif not inspect.isfunction(inspect.getattr_static(found, name, None)):
        return True  # its signature is checked on the object, once that is built
    named = {one.name: None for one in given if one.kind is one.KEYWORD_ONLY}
    try:
        inspect.signature(own).bind(*[None] * (len(given) - len(named)), **named)
    except TypeError:
        return False
    except ValueError:  # a function written in C may have no signature
        return True
    return True
