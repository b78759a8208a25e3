"""Success-gated transfer (SGT, arXiv 2605.07244): where all own answers failed, imitate one verified answer of a peer.

    S        = { x : every own answer on x failed, and a peer's success on x was received in time }
    L_SGT    = L_GRPO + lambda L_rescue,   lambda = 0.1 as reported for the method
    L_rescue = -(1/Z) sum_{x in S} (1/|y*|) sum_t log pi_theta(y*_t | x, y*_<t),
    y* ~ Uniform{ received successes on x }

y* is the peer's text in own tokens, closed by the own EOS when the peer ended it itself. The normaliser Z is a choice
of this code: "rescues" counts the rescued prompts of the batch, those that had been pending included; "prompts" counts
the own groups of the batch. Policies run asynchronously, so a success may come after the failure it answers: `pending`
says how a failure waits and how it is settled.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from mrl.alignment.flags import Rejected
from mrl.alignment.receiver import Receiver
from mrl.config.schema import Table
from mrl.records.codec import unpack_array
from mrl.records.experience import MAX_COMPLETION_BYTES, ExperienceRecord, OutcomeRecord, Received
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.cost import Tried, align_shared, shared_values, trace_of, tried_values
from mrl.sharing.independent import POLICY_GRADIENT, length_mean_weights, own_rows
from mrl.sharing.pending import Failure, PendingFailures
from mrl.sharing.regime import SUCCESS_REWARD, Absorbed, Asking, Author, Component, Int32s, Rescue, TrainingExample

RESCUE = "rescue"
RECORDS_PER_ASK = 16

Chosen = list[tuple[Received, Int32s]]
"""Peer successes picked for one prompt, with their text in own tokens."""


class SgtParameters(Table):
    """The `[sharing.sgt]` table."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    lambda_: float = Field(0.1, alias="lambda", ge=0, allow_inf_nan=False)
    """Coefficient of the rescue term."""
    normaliser: Literal["rescues", "prompts"] = "rescues"
    """What divides the rescue term: rescued prompts of the batch, or all prompts of the batch."""
    gate_age_versions: int = Field(8, ge=0)
    """A failure is rescued only while the learner is at most this many versions past the one that failed."""
    max_pending: int = Field(1024, ge=1)
    """Failures that wait at once."""
    max_age_versions: int | None = Field(None, ge=0)
    """Peer successes older than this are ignored; without it any age is taken, since a verified text stays right."""
    successes_per_rescue: int = Field(1, ge=1, le=16)
    """Distinct peer answers per rescued prompt; they share the weight of one."""
    publish_per_group: int = Field(1, ge=1, le=16)
    """Distinct own successes per group that are published."""
    finished_only: bool = True
    """Publish and use only answers that ended by themselves."""


class SgtRegime:
    """GRPO on own groups, and imitation of verified peer answers on prompts where the own group failed."""

    reads: frozenset[str] = frozenset({"outcome"})

    def __init__(self, parameters: SgtParameters, *, policy: str, receiver: Receiver, max_answer_tokens: int) -> None:
        self.parameters = parameters
        self.policy = policy
        self.receiver = receiver
        self.max_answer_tokens = max_answer_tokens
        kind: Literal["prompts", "constant"] = "prompts" if parameters.normaliser == "rescues" else "constant"
        self.components = (POLICY_GRADIENT, Component(RESCUE, "imitation", parameters.lambda_, kind))
        self.asking = Asking(RECORDS_PER_ASK, parameters.max_age_versions, watch=True)
        self._pending = PendingFailures(
            max_pending=parameters.max_pending, gate_age_versions=parameters.gate_age_versions
        )

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """The first distinct successes; a group's answers are exchangeable, so the first is a uniform draw."""
        chosen: dict[bytes, Answer] = {}
        for answer in group.answers:
            if self._is_publishable(answer):
                chosen.setdefault(answer.completion, answer)
        return [
            _outcome(group, answer, author, self.receiver)
            for answer in list(chosen.values())[: self.parameters.publish_per_group]
        ]

    def asks(self, group: ScoredGroup) -> list[str]:
        """The group's prompt when every answer failed; a success ends the wait for an older failure on it."""
        if any(answer.reward >= SUCCESS_REWARD for answer in group.answers):
            self._pending.succeeded(group.prompt_id, group.newest)
            return []
        prompt_token_ids = tuple(unpack_array(group.prompt_token_ids, "i4").tolist())
        self._pending.failed(Failure(group.prompt_id, prompt_token_ids, group.newest))
        return [group.prompt_id]

    def awaited(self) -> list[str]:
        """Prompts whose failure is pending."""
        return self._pending.prompt_ids

    def absorb(
        self, groups: Sequence[ScoredGroup], received: Sequence[Received], *, step: int, rng: np.random.Generator
    ) -> Absorbed:
        """Own GRPO rows, and the rescues that `received` makes possible.

        Without a rescue the rows are those of `IndependentRegime`, bit for bit, and `rng` is untouched.
        """
        self._pending.expire(step=step)
        ignored: Counter[str] = Counter()
        tried: list[Tried] = []
        own, num_own_rows = own_rows(groups, source=self.policy)
        rescues: list[TrainingExample] = []
        chosen_items: list[Received] = []
        num_rescued_prompts = 0
        for prompt_id, candidates in self._usable(received, ignored).items():
            chosen = self._choose(candidates, rng, tried)
            if chosen:
                failure = self._pending.hit(prompt_id, chosen[0][0].record.source)
                rescues += [_rescue_row(failure, item.record.source, ids, len(chosen)) for item, ids in chosen]
                chosen_items += [item for item, _ in chosen]
                num_rescued_prompts += 1
        used = [(len(own) + place, item.record) for place, item in enumerate(chosen_items)]
        shared = align_shared(used, self.receiver, max_tokens=self.max_answer_tokens)
        counts = _counts(rescues, chosen_items, ignored, tried) | tried_values(tried) | shared_values(shared)
        divisor = num_rescued_prompts if self.parameters.normaliser == "rescues" else len(groups)
        return Absorbed(
            examples=own + rescues,
            denominators={POLICY_GRADIENT.name: num_own_rows, RESCUE: float(max(1, divisor))},
            forget=self._pending.take_forgotten(),
            counts=self._pending.take_counts() | counts,
            rescued=[Rescue(i.record.prompt_id, i.record.source, i.record.completion) for i in chosen_items],
            shared=shared,
        )

    def state(self) -> dict[str, Any]:
        """The pending table and the cumulative counts."""
        return self._pending.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; the caller asks again for `awaited()`."""
        self._pending.restore(state)

    def _is_publishable(self, answer: Answer) -> bool:
        is_usable = answer.finished or not self.parameters.finished_only
        return is_usable and answer.reward >= SUCCESS_REWARD and 0 < len(answer.completion) <= MAX_COMPLETION_BYTES

    def _usable(self, received: Sequence[Received], ignored: Counter[str]) -> dict[str, list[Received]]:
        by_prompt: defaultdict[str, list[Received]] = defaultdict(list)
        for item in received:
            reason = self._ignore_reason(item)
            if reason:
                ignored[reason] += 1
            else:
                by_prompt[item.record.prompt_id].append(item)
        return by_prompt

    def _ignore_reason(self, item: Received) -> str:
        record, oldest = item.record, self.parameters.max_age_versions
        if record.source == self.policy:
            return "own"
        if record.reward < SUCCESS_REWARD:
            return "failed"
        if self.parameters.finished_only and not record.finished:
            return "unfinished"
        if oldest is not None and item.age_versions > oldest:
            return "stale"
        return "" if record.prompt_id in self._pending else "not_pending"

    def _choose(self, candidates: list[Received], rng: np.random.Generator, tried: list[Tried]) -> Chosen:
        chosen: Chosen = []
        texts: set[bytes] = set()
        for index in rng.permutation(len(candidates)):
            item = candidates[index]
            if len(chosen) == self.parameters.successes_per_rescue or item.record.completion in texts:
                continue
            texts.add(item.record.completion)
            result = self.receiver.retokenize(
                item.record.completion, finished=item.record.finished, max_tokens=self.max_answer_tokens
            )
            tried.append(Tried(item.record, result.reason if isinstance(result, Rejected) else ""))
            if not isinstance(result, Rejected):
                chosen.append((item, result.token_ids))
        return chosen


def _outcome(group: ScoredGroup, answer: Answer, author: Author, receiver: Receiver) -> OutcomeRecord:
    versions = [span.version for span in answer.versions]
    return OutcomeRecord(
        record_id=author.make_id(),
        source=author.policy,
        oldest=min(versions),
        newest=max(versions),
        fingerprint=author.fingerprint,
        prompt_id=group.prompt_id,
        task=group.task,
        created_unix_s=author.now_unix_s,
        completion=answer.completion,
        finished=answer.finished,
        verifier=author.verifier,
        reward=answer.reward,
        trace=trace_of(answer, receiver),
    )


def _rescue_row(failure: Failure, source: str, answer_token_ids: Int32s, rows_sharing: int) -> TrainingExample:
    num_tokens = len(answer_token_ids)
    return TrainingExample(
        prompt_token_ids=np.asarray(failure.prompt_token_ids, dtype=np.int32),
        answer_token_ids=answer_token_ids,
        component=RESCUE,
        advantages=np.zeros(num_tokens, dtype=np.float32),
        weights=length_mean_weights(num_tokens, rows_sharing=rows_sharing),
        behaviour_logprobs=None,
        prompt_id=failure.prompt_id,
        source=source,
    )


def _counts(
    rescues: Sequence[TrainingExample], chosen: Sequence[Received], ignored: Counter[str], tried: Sequence[Tried]
) -> dict[str, float]:
    rejected = Counter(item.reason for item in tried if item.reason)
    counts = {
        "sharing/rescues": float(len(rescues)),
        "sharing/rescue_tokens": float(sum(row.answer_token_ids.size for row in rescues)),
        "align/rejected": float(rejected.total()),
    }
    if chosen:
        counts["sharing/rescue_age_versions"] = sum(item.age_versions for item in chosen) / len(chosen)
    counts |= {f"regime/ignored_{reason}": float(n) for reason, n in ignored.items()}
    return counts | {f"regime/rejected_{reason}": float(n) for reason, n in rejected.items()}
