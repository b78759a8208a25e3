"""Success-gated transfer (SGT, arXiv 2605.07244): where all own answers failed, imitate one verified answer of a peer.

    S        = { x : every own answer on x failed, and a peer's success on x was received in time }
    L_SGT    = L_GRPO + lambda L_rescue,   lambda = 0.1 as reported for the method
    L_rescue = -(1/Z) sum_{x in S} (1/|y*|) sum_t log pi_theta(y*_t | x, y*_<t),
    y* ~ Uniform{ received successes on x }

y* is the peer's text in own tokens, closed by the own EOS when the peer ended it itself. The normaliser Z is a choice
of this code. "prompts" counts the prompts sampled for the batch: those of its own groups, and those of groups that
dynamic sampling has dropped. "rescues" counts its rescued prompts, older failures included. "tokens" counts the
tokens of its rescues, which then weigh alike in short and long rescues. Policies run asynchronously, so a success may
come after the failure that it answers: `mrl.sharing.rescues` says how a failure waits and how it is settled. A success
that was verified before the failure lies in the exchange's memory, and answers at once.

Reads of a peer: verified texts (outcome records) on prompts that failed here. On the wire, per prompt with a success:
about 360 bytes, one text, and 13 bytes per token (ids, lengths and log-probs, for the residual). Costs: one forward and
backward pass over the rescue's tokens; no density ratio.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field

from mrl.config.table import Table, Tuned
from mrl.objectives.specs import Imitation
from mrl.records.experience import MAX_COMPLETION_BYTES, EpisodeRecord, ExperienceRecord, OutcomeRecord, Received
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_examples, prompt_of
from mrl.sharing.own_objective import POLICY_GRADIENT
from mrl.sharing.own_traces import trace_of
from mrl.sharing.peer_episodes import PeerEpisode, peer_episode, said_in, shared_turns
from mrl.sharing.peer_traces import PeerTrace, peer_traces
from mrl.sharing.regime import (
    AbsorbResult,
    Author,
    Component,
    DenominatorKind,
    PeerQuery,
    PeerWait,
    Rescue,
    TrainingExample,
)
from mrl.sharing.rescues import Failure, PendingRescues

RESCUE = "rescue"
RECORDS_PER_ASK = 16
DENOMINATORS: dict[str, DenominatorKind] = {"prompts": "prompts", "rescues": "prompts", "tokens": "tokens"}
"""Normaliser -> the unit that the rescue component counts: prompts of own groups, prompts rescued, tokens of
rescues."""
MAX_HEARD = 4096
"""Records kept for the next batch; the oldest go first."""


class Success(NamedTuple):
    """A success of a peer that is trained on."""

    answer: PeerTrace | PeerEpisode
    age_versions: int


class SgtParameters(Table):
    """The `[sharing.sgt]` table."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    lambda_: Annotated[float, Tuned((0.1, 0.3, 0.6, 1.0))] = Field(0.1, alias="lambda", ge=0, allow_inf_nan=False)
    """Coefficient of the rescue term."""
    normaliser: Annotated[Literal["prompts", "rescues", "tokens"], Tuned(("prompts", "rescues"))] = "prompts"
    """Divisor of the rescue term: all prompts of the batch, its rescued prompts, or the tokens of its rescues."""
    gate_age_versions: int = Field(8, ge=0)
    """A failure is rescued only while the learner is at most this many versions past the version that failed."""
    max_pending: int = Field(1024, ge=1)
    """Most failures that wait at once; beyond that the least recent expires."""
    max_age_versions: int | None = Field(None, ge=0)
    """Peer successes older than this are ignored; without it any age is taken, since a verified text stays right."""
    finished_only: bool = True
    """Whether only answers that ended by themselves are published and used."""


class SgtRegime:
    """Trains by the own objective on own groups, and imitates peers' successes as rescues."""

    patience: PeerWait | None = None

    def __init__(self, parameters: SgtParameters, context: SharingContext) -> None:
        self.parameters = parameters
        self.context = context
        kind = DENOMINATORS[parameters.normaliser]
        rescue = Component(RESCUE, Imitation(), parameters.lambda_, kind, "peer")
        self.components = (context.objective.component(), rescue)
        self.asking: PeerQuery | None = PeerQuery(("outcome", "episode"), RECORDS_PER_ASK, parameters.max_age_versions)
        self._heard: deque[Received] = deque(maxlen=MAX_HEARD)
        self._num_overflown = 0
        self._droppable: set[str] = set()
        self._pending = PendingRescues(
            max_pending=parameters.max_pending, gate_age_versions=parameters.gate_age_versions
        )

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Return the first success; a group's answers are exchangeable, so the first is a uniform draw."""
        for answer in group.answers:
            if self._is_publishable(answer):
                return [self._outcome(group, answer, author)]
        return []

    def asks(self, group: ScoredGroup) -> list[str]:
        """Return the prompt of a group that failed. A group with a success settles an older failure on its prompt."""
        if self.context.objective.drop_uniform_groups and group.is_uniform:
            self._droppable.add(group.ticket)
        if any(self._is_success(answer) for answer in group.answers):
            self._pending.succeeded(group.prompt_id, group.newest)
            return []
        self._pending.failed(Failure(group.prompt_id, tuple(prompt_of(group).tolist()), group.newest))
        return [group.prompt_id]

    def awaited(self) -> list[str]:
        """Return the prompts whose failure is pending."""
        return self._pending.prompt_ids

    def hear(self, received: Sequence[Received], *, step: int) -> None:
        """Note records for the next batch. A record that answers no failure at that time is counted and forgotten."""
        self._num_overflown += max(0, len(self._heard) + len(received) - MAX_HEARD)
        self._heard.extend(received)

    def is_settled(self, group: ScoredGroup) -> bool:
        """Return true: a failure waits without its group."""
        return True

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """Return own rows, and the rescues that were heard.

        Without a rescue the rows are those of `IndependentRegime`, bit for bit, and `rng` is untouched.
        """
        self._pending.expire(step=step)
        counts: Counter[str] = Counter({"align/rejected": 0})
        own = own_examples(groups, self.context)
        rescues: list[TrainingExample] = []
        used: list[Success] = []
        for prompt_id, candidates in self._take_usable(counts).items():
            success = self._choose(candidates, rng, counts)
            if success is not None:
                failure = self._pending.hit(prompt_id, success.answer.source)
                rescues.append(self._rescue_row(failure, success.answer))
                used.append(success)
        num_tokens = sum(row.num_trained_tokens for row in rescues)
        num_prompts = len(groups) + self._take_dropped(groups)
        divisors = {"prompts": num_prompts, "rescues": len(rescues), "tokens": num_tokens}
        counts.update({"sharing/rescues": len(rescues), "sharing/rescue_tokens": num_tokens})
        counts["sharing/withheld_answers"] = sum(self._is_withheld(one) for group in groups for one in group.answers)
        values = self._pending.take_counts() | {name: float(count) for name, count in counts.items()}
        if used:
            values["sharing/rescue_age_versions"] = sum(one.age_versions for one in used) / len(used)
        return AbsorbResult(
            examples=own.examples + rescues,
            denominators={
                POLICY_GRADIENT: self.context.objective.denominator(own.lengths),
                RESCUE: float(max(1, divisors[self.parameters.normaliser])),
            },
            forget=self._pending.take_forgotten(),
            counts=values,
            rescued=[_shown(row, one.answer) for row, one in zip(rescues, used, strict=True)],
        )

    def state(self) -> dict[str, Any]:
        """Return the table of failures, the cumulative counts, and tickets of groups that dynamic sampling may drop."""
        return self._pending.state() | {"droppable": sorted(self._droppable)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; the caller asks again for `awaited()`."""
        self._pending.restore(state)
        self._droppable = set(state["droppable"])

    def _take_dropped(self, groups: Sequence[ScoredGroup]) -> int:
        """Return the number of groups since the last batch that dynamic sampling has kept out of `groups`."""
        dropped = self._droppable - {group.ticket for group in groups}
        self._droppable.clear()
        return len(dropped)

    def _rescue_row(self, failure: Failure, answer: PeerTrace | PeerEpisode) -> TrainingExample:
        """Return the row of one rescue: a mean over tokens; with the normaliser "tokens" every token counts 1."""
        weight = 1.0 if self.parameters.normaliser == "tokens" else 1.0 / answer.num_tokens
        return answer.example(
            np.asarray(failure.prompt_token_ids, dtype=np.int32),
            component=RESCUE,
            weights=np.full(answer.num_tokens, weight, dtype=np.float32),
        )

    def _is_publishable(self, answer: Answer) -> bool:
        is_usable = (answer.finished or not self.parameters.finished_only) and not answer.is_unsayable
        return is_usable and self._is_success(answer) and 0 < len(answer.completion) <= MAX_COMPLETION_BYTES

    def _is_withheld(self, answer: Answer) -> bool:
        """Whether an own success is kept from peers because it was cut at the token limit."""
        is_cut = answer.finish_reason == FinishReason.LENGTH
        return self.parameters.finished_only and is_cut and self._is_success(answer)

    def _is_success(self, answer: Answer) -> bool:
        return answer.reward >= self.context.success_reward

    def _outcome(self, group: ScoredGroup, answer: Answer, author: Author) -> OutcomeRecord | EpisodeRecord:
        versions = [span.version for span in answer.versions]
        tags = author.tags(group) | {"oldest": min(versions), "newest": max(versions)}
        if answer.segments:
            turns = shared_turns(answer)
            return EpisodeRecord(**tags, turns=turns, verifier=author.verifier, reward=answer.reward)
        return OutcomeRecord(
            **tags,
            completion=answer.completion,
            finish_reason=answer.finish_reason,
            verifier=author.verifier,
            reward=answer.reward,
            trace=trace_of(answer, self.context.receiver),
        )

    def _take_usable(self, counts: Counter[str]) -> dict[str, list[Received]]:
        """Return the records that answer a pending failure, by prompt in order of arrival."""
        heard = list(self._heard)
        self._heard.clear()
        if self._num_overflown:
            counts["regime/ignored_overflow"], self._num_overflown = self._num_overflown, 0
        by_prompt: defaultdict[str, list[Received]] = defaultdict(list)
        for item in heard:
            reason = self._ignore_reason(item)
            if reason:
                counts[f"regime/ignored_{reason}"] += 1
            else:
                by_prompt[item.record.prompt_id].append(item)
        return by_prompt

    def _ignore_reason(self, item: Received) -> str:
        record, oldest = item.record, self.parameters.max_age_versions
        if record.source == self.context.policy:
            return "own"
        if not isinstance(record, OutcomeRecord | EpisodeRecord):
            return "other"
        if record.reward < self.context.success_reward:
            return "failed"
        if self.parameters.finished_only and isinstance(record, OutcomeRecord) and not record.finished:
            return "unfinished"
        if oldest is not None and item.age_versions > oldest:
            return "stale"
        return "" if record.prompt_id in self._pending else "not_pending"

    def _choose(self, candidates: list[Received], rng: np.random.Generator, counts: Counter[str]) -> Success | None:
        """Return the success of one rescue, drawn uniformly; of successes with the same text only one is read."""
        texts: set[bytes] = set()
        for index in rng.permutation(len(candidates)):
            record, age_versions = candidates[index].record, candidates[index].age_versions
            assert isinstance(record, OutcomeRecord | EpisodeRecord), "others were ignored"
            text = record.completion if isinstance(record, OutcomeRecord) else said_in(record.turns).encode()
            if text in texts:
                continue
            texts.add(text)
            answer = self._read(record)
            if answer.is_usable:
                return Success(answer, age_versions)
            counts.update(["align/rejected", f"regime/rejected_{answer.rejected}"])
        return None

    def _read(self, record: OutcomeRecord | EpisodeRecord) -> PeerTrace | PeerEpisode:
        """Return a peer's success in own tokens."""
        if isinstance(record, EpisodeRecord):
            return peer_episode(record, self.context.renderer)
        ((trace,),) = peer_traces([record], self.context, needs_trace=False)
        return trace


def _shown(row: TrainingExample, answer: PeerTrace | PeerEpisode) -> Rescue:
    rescue = Rescue(row.prompt_id, row.source, answer.completion, answer.reward)
    if not isinstance(answer, PeerEpisode):
        return rescue
    return replace(rescue, prompt_token_ids=tuple(row.prompt_token_ids.tolist()), turns=tuple(answer.record.turns))
