"""Reinforcement-aware distillation (RLAD, arXiv 2602.22495): a teacher's engine scores own answers, and its log-probs
move the trust region.

    r = (pi_theta / pi_old)^alpha (pi_theta / pi_teacher)^(1 - alpha),   in place of the ratio of the clipped objective

The teacher is a frozen policy of the run or a live peer; with other tokens its log-probs are those of common spans,
divided over own tokens. An answer that was not scored in time has the plain ratio: the policy's own objective, which
has to clip ratios of tokens (grpo, dr_grpo, dapo). Groups without advantages are not sent. Advantages are those of the
policy's own objective; the paper's have the population's deviation, which `objective.std_correction = 0` sets.

Reads of a peer: log-probs of own answers (score records). On the wire, per prompt with a mixed group: to the teacher
about 270 bytes, and for every answer 35 and its text; back 280, and for every answer 40 and 9 per token of the
teacher's. Costs: one forward pass of the teacher per answer of a mixed group.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import UNSET
from pydantic import Field

from mrl.config.table import Table, Tuned
from mrl.objectives.specs import Trrd
from mrl.records.experience import (
    MAX_COMPLETION_BYTES,
    MAX_SCORES,
    ExperienceRecord,
    GivenAnswer,
    Received,
    ScoreRecord,
    ScoreRequestRecord,
)
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_advantages, own_examples
from mrl.sharing.own_objective import POLICY_GRADIENT, clips_tokens
from mrl.sharing.own_traces import answer_bytes, last_reason
from mrl.sharing.peer_episodes import shared_turns
from mrl.sharing.regime import AbsorbResult, Author, PeerQuery, PeerWait, TrainingExample
from mrl.sharing.teacher_traces import UNSCORED, num_scores, teacher_traces

MAX_OPEN = 4096
SCORES_PER_ASK = 4


class RladParameters(Table):
    """The `[sharing.rlad]` table."""

    teacher: str = ""
    """The policy that scores; empty for the first other policy by name."""
    alpha: Annotated[float, Tuned((0.25, 0.5, 0.75))] = Field(0.5, ge=0, le=1)
    """Weight of the policy's own past in the ratio's base; 1 is the policy's own objective, grpo, dr_grpo or dapo."""
    teacher_clamp: Annotated[float | None, Tuned((0.5, 1.0, 2.0))] = Field(1.0, gt=0)
    """Bound of |log pi_theta - log pi_teacher| per token, in nats."""
    peer_hold_versions: int = Field(1, ge=0)
    """Steps for which an own group without its scores may be passed over."""
    peer_wait_s: float = Field(2.0, ge=0)
    """Longest wait of a batch for its scores; a synchronous run waits `run.sync_timeout_s` and ends without them."""

    def teachers_of(self, policy: str, policies: Sequence[str]) -> tuple[str, ...]:
        """Return the policy that scores for `policy`, alone. Empty where nobody does, as for the teacher itself."""
        others = sorted(set(policies) - {policy})
        wanted = self.teacher or (others[0] if others else "")
        return (wanted,) if wanted in others else ()


class _Asked(NamedTuple):
    """An open request about one own group."""

    prompt_id: str
    teacher: str
    step: int
    """Step of the group's newest version."""


class ScoreReader:
    """The part of a regime that asks teachers for the scores of own groups, and keeps the scores until the groups are
    trained.
    """

    num_units = 0
    """Units that teachers are asked to tell for each place."""

    def __init__(self, context: SharingContext, teachers: Sequence[str], patience: PeerWait) -> None:
        self.context = context
        self.teachers = tuple(teachers)
        self.asking: PeerQuery | None = None
        self.patience: PeerWait | None = None
        if teachers:
            self.asking = PeerQuery(("score",), SCORES_PER_ASK, None, scorer=", ".join(teachers))
            self.patience = patience
        self._open: dict[str, _Asked] = {}
        """Request id -> open request. Requests about groups that were dropped are closed once these are too stale to be
        trained on."""
        self._newest_step = 0
        self._scores: dict[str, ScoreRecord] = {}
        self._forget: dict[str, None] = {}
        self._ignored: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()

    def teacher_of(self, group: ScoredGroup) -> str | None:
        """Return the teacher that is asked about a group, None for nobody; from what worker and learner both know of
        the group.
        """
        raise NotImplementedError

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Return a request to score the group; none for a group without a teacher, with an oversized text, or with no
        text that crosses.
        """
        teacher = self._scorer_of(group)
        if teacher is None:
            return []
        return [
            ScoreRequestRecord(
                **author.tags(group) | {"record_id": request_id(author.policy, group.ticket)},
                scorer=teacher,
                answers=[_given(answer) for answer in group.answers],
                opening=UNSET if group.opening is None else group.opening,
                num_units=self.num_units or UNSET,
            )
        ]

    def asks(self, group: ScoredGroup) -> list[str]:
        """Return the prompt of a group that was sent to a teacher."""
        teacher = self._scorer_of(group)
        if teacher is None:
            return []
        asked = _Asked(group.prompt_id, teacher, group.newest.step)
        self._open[request_id(self.context.policy, group.ticket)] = asked
        self._newest_step = max(self._newest_step, asked.step)
        while self._open and (len(self._open) > MAX_OPEN or self._is_over(next(iter(self._open.values())))):
            self._close(next(iter(self._open)))
        return [group.prompt_id]

    def awaited(self) -> list[str]:
        """Return the prompts whose groups have no scores yet."""
        return list(dict.fromkeys(one.prompt_id for name, one in self._open.items() if name not in self._scores))

    def hear(self, received: Sequence[Received], *, step: int) -> None:
        """Keep the scores of open requests."""
        for item in received:
            record = item.record
            if not isinstance(record, ScoreRecord) or record.source not in self.teachers:
                self._ignored["other"] += 1
            elif record.request_id not in self._open:
                self._ignored["late"] += 1
            elif record.source != self._open[record.request_id].teacher:
                self._ignored["other"] += 1
            else:
                self._scores[record.request_id] = record

    def is_settled(self, group: ScoredGroup) -> bool:
        """Whether the scores of `group` have arrived. A group that was never sent is settled."""
        request = request_id(self.context.policy, group.ticket)
        return request not in self._open or request in self._scores

    def state(self) -> dict[str, Any]:
        """Return the totals behind the cumulative rate. Open groups are sampled again."""
        return {"totals": dict(self._totals)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self._totals = Counter(state["totals"])

    def with_scores(
        self, rows: list[TrainingExample], group: ScoredGroup, counts: Counter[str]
    ) -> list[TrainingExample]:
        """Return the own rows of a group, with the teacher's log-probs where it was asked and gave sound ones.

        The group's request is closed: each group is read once.
        """
        request = request_id(self.context.policy, group.ticket)
        record = self._scores.get(request)
        self._close(request)
        if self._scorer_of(group) is None:
            return rows
        num_asked = sum(not answer.is_unsayable for answer in group.answers)
        counts["asked"] += num_asked
        if record is None or not _fits(record, group):
            counts["absent"] += num_asked
            return rows
        scored = []
        for row, (examined, trace) in zip(rows, teacher_traces(group, record, self.context), strict=True):
            counts["unscored"] += examined.rejected == UNSCORED
            if trace is not None:
                counts["scored"] += 1
                row = replace(
                    row,
                    teacher_logprobs=trace.logprobs,
                    teacher_spans=trace.spans,
                    teacher_units=trace.units if self.num_units else None,
                    examined=examined,
                )
            scored.append(row)
        return scored

    def absorbed(self, examples: list[TrainingExample], lengths: list[int], counts: Counter[str]) -> AbsorbResult:
        """Return a step of own rows without the masked ones; `lengths` are the tokens of every answer that is not
        masked.
        """
        return AbsorbResult(
            [row for row in examples if row.weights.any()],
            {POLICY_GRADIENT: self.context.objective.denominator(lengths)},
            forget=self._take_forgotten(),
            counts=self._values(counts),
        )

    def _scorer_of(self, group: ScoredGroup) -> str | None:
        fits = all(answer_bytes(answer) <= MAX_COMPLETION_BYTES for answer in group.answers)
        fits = fits and num_scores(group.answers) <= MAX_SCORES and not all(one.is_unsayable for one in group.answers)
        return self.teacher_of(group) if self.teachers and fits else None

    def _is_over(self, asked: _Asked) -> bool:
        """Whether the group is too stale to be trained on: the learner is at the newest step, or beyond."""
        return self._newest_step - asked.step > self.context.max_staleness_versions

    def _close(self, request: str) -> None:
        self._scores.pop(request, None)
        asked = self._open.pop(request, None)
        if asked is not None:
            self._forget[asked.prompt_id] = None

    def _take_forgotten(self) -> list[str]:
        """Return the prompts of requests that were closed since the last call, without prompts that have another open
        request.
        """
        still_open = {asked.prompt_id for asked in self._open.values()}
        forgotten = [prompt_id for prompt_id in self._forget if prompt_id not in still_open]
        self._forget.clear()
        return forgotten

    def _values(self, counts: Counter[str]) -> dict[str, float]:
        """Return the metrics of a step with these counts of rows."""
        ignored, self._ignored = self._ignored, Counter()
        self._totals.update(asked=counts["asked"], scored=counts["scored"])
        values = {f"sharing/{name}_rows": float(count) for name, count in counts.items()}
        values |= {f"regime/ignored_{reason}": float(count) for reason, count in ignored.items()}
        if self._totals["asked"]:
            values["sharing/hit_rate"] = self._totals["scored"] / self._totals["asked"]
        return values


class RladRegime(ScoreReader):
    """Trains on own rows with a teacher's log-probs."""

    def __init__(self, parameters: RladParameters, context: SharingContext) -> None:
        teachers = parameters.teachers_of(context.policy, context.others)
        super().__init__(context, teachers, PeerWait(parameters.peer_hold_versions, parameters.peer_wait_s))
        self.parameters = parameters
        self.components = (context.objective.component(term=_term(parameters, context) if teachers else None),)

    def teacher_of(self, group: ScoredGroup) -> str | None:
        """Return the one teacher; None for a group whose advantages are all 0."""
        return self.teachers[0] if own_advantages(group, self.context.objective).any() else None

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return own rows; rows of scored answers have the teacher's log-probs."""
        counts: Counter[str] = Counter(asked=0, scored=0, absent=0, unscored=0)
        examples: list[TrainingExample] = []
        lengths: list[int] = []
        for group in groups:
            own = own_examples([group], self.context, keep_masked=True)  # a row for each score
            lengths += own.lengths
            examples += self.with_scores(own.examples, group, counts)
        return self.absorbed(examples, lengths, counts)


def _fits(record: ScoreRecord, group: ScoredGroup) -> bool:
    """Whether the record has as many scores, and units, as were asked for about the group."""
    wanted = num_scores(group.answers)
    return len(record.scores) == wanted and (record.units is UNSET or len(record.units) == wanted)


def _given(answer: Answer) -> GivenAnswer:
    """Return an own answer in the form that is sent to a teacher."""
    if not answer.segments:
        return GivenAnswer(completion=answer.completion, finish_reason=answer.finish_reason)
    return GivenAnswer(completion=b"", finish_reason=last_reason(answer), turns=shared_turns(answer))


def request_id(policy: str, ticket: str) -> str:
    """Return the id of the request about one group. Its worker and its learner both know it."""
    return f"{policy}:{ticket}:score"


def _term(parameters: RladParameters, context: SharingContext) -> Trrd:
    """Return the term of own rows: the policy's own clips with the teacher's ratio."""
    own = context.objective.term
    assert clips_tokens(own), "others are refused before a run starts"
    return Trrd(
        alpha=parameters.alpha,
        clip_low=own.clip_low,
        clip_high=own.clip_high,
        teacher_clamp=parameters.teacher_clamp,
        dual_clip=own.dual_clip,
        correction=own.correction,
    )
