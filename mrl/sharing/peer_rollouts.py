"""Whole groups of peers as training rows: what PRP, HACPO and GRAFT share.

A step's peer answers are carried over in one batch per peer. Rejected ones are counted; their rewards still count in
baselines, because a reward needs no tokenizer. An objective that takes reward from overlong answers takes it from those
of peers too, by their length in own tokens; otherwise own and peers' rewards could not be compared.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mrl.alignment.aligned_batch import AlignedTrace
from mrl.alignment.selection import select_rows
from mrl.records.codec import unpack_array
from mrl.records.experience import ExperienceRecord, Received, RolloutRecord, SharedAnswer
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.advantages import Float32s, Float64s
from mrl.sharing.carried import Carried, carry, rollout_record
from mrl.sharing.cost import SharedRows, Tried, shared_values, tried_values
from mrl.sharing.own_rows import own_advantages
from mrl.sharing.peer_groups import PeerGroupParameters, PeerGroupReader
from mrl.sharing.regime import Absorbed, Author, Int32s, TrainingExample
from mrl.sharing.setting import Setting


class PeerRow(NamedTuple):
    """One usable answer of a peer to the prompt of an own group."""

    group: ScoredGroup
    source: str
    answer: SharedAnswer
    trace: AlignedTrace
    place: int
    """Its place among all answers of peers to that prompt."""
    number: int
    """Its row among all answers of its source in the step."""


class PeerRows(NamedTuple):
    """All answers of peers to the groups of a step."""

    of_group: list[list[PeerRow]]
    """Usable ones, per own group."""
    num_tokens: list[list[int]]
    """Of all answers of peers to an own group's prompt, in order: how long they are in own tokens. 0 where one cannot
    be expressed in them, the limit where that is because it is too long."""
    tried: list[Tried]
    """Every answer that was looked at, by source, those of a source by row."""
    carried: Mapping[str, Carried]
    """By source, every answer that was looked at."""

    def shared(self, trained: Sequence[tuple[PeerRow, int]]) -> list[SharedRows]:
        """Per peer the rows that are trained on, each with its place among the examples."""
        places: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for row, place in trained:
            places[row.source][row.number] = place
        tried: defaultdict[str, list[Tried]] = defaultdict(list)
        for one in self.tried:
            tried[one.source].append(one)
        return [
            SharedRows(
                source,
                tuple(of_row[number] for number in sorted(of_row)),
                select_rows(self.carried[source].batch, sorted(of_row)),
                tuple(tried[source][number] for number in sorted(of_row)),
            )
            for source, of_row in sorted(places.items())
        ]


class _PeerAnswerAt(NamedTuple):
    """One answer of a peer."""

    group: int
    """Which own group it is about."""
    place: int
    """Among all answers of peers to that group's prompt."""
    record: RolloutRecord
    number: int
    """Its place in the record."""

    @property
    def answer(self) -> SharedAnswer:
        return self.record.answers[self.number]


def rollouts_of(received: Sequence[Received]) -> list[RolloutRecord]:
    """The rollout records among them."""
    return [item.record for item in received if isinstance(item.record, RolloutRecord)]


def rewards_of(records: Sequence[RolloutRecord]) -> Float64s:
    """Rewards of all answers of these groups, in order; `PeerRow.place` counts in the same way."""
    return np.array([answer.reward for record in records for answer in record.answers], dtype=np.float64)


def carry_groups(
    groups: Sequence[ScoredGroup], heard: Sequence[Sequence[RolloutRecord]], setting: Setting, *, needs_trace: bool
) -> PeerRows:
    """Peers' answers in own tokens; `heard[i]` are the groups of peers on the prompt of `groups[i]`."""
    by_source: defaultdict[str, list[_PeerAnswerAt]] = defaultdict(list)
    for group, records in enumerate(heard):
        told_here = [(record, number) for record in records for number in range(len(record.answers))]
        for place, (record, number) in enumerate(told_here):
            by_source[record.source].append(_PeerAnswerAt(group, place, record, number))
    of_group: list[list[PeerRow]] = [[] for _ in groups]
    num_tokens = [[0] * sum(len(record.answers) for record in records) for records in heard]
    tried: list[Tried] = []
    carried: dict[str, Carried] = {}
    for source, told in sorted(by_source.items()):
        fingerprints = [one.record.fingerprint for one in told]
        texts = [one.answer for one in told]
        carried[source] = carry(texts, fingerprints, setting.receiver, max_tokens=setting.max_answer_tokens)
        for row, one in enumerate(told):
            reason = carried[source].reason(row, needs_trace=needs_trace)
            fault, record = carried[source].trace_faults[row], one.record
            tried.append(Tried(source, reason, fault, record.prompt_id, record.record_id, one.number))
            trace = carried[source].batch.row(row)
            is_too_long = trace.reject_reason == "too_long"
            num_tokens[one.group][one.place] = setting.max_answer_tokens if is_too_long else len(trace.token_ids)
            if not reason:
                of_group[one.group].append(PeerRow(groups[one.group], source, one.answer, trace, one.place, row))
    return PeerRows(of_group, num_tokens, tried, carried)


def peer_example(
    row: PeerRow,
    *,
    component: str,
    advantage: float | np.floating,
    weights: Float32s,
    behaviour: Float32s | None,
    spans: Int32s | None = None,
    phase: int = 0,
    num_tokens: int | None = None,
) -> TrainingExample:
    """The training row of a peer's answer, cut at `num_tokens`; its advantage is the same at every token."""
    token_ids = row.trace.token_ids[:num_tokens]
    return TrainingExample(
        prompt_token_ids=unpack_array(row.group.prompt_token_ids, "i4"),
        answer_token_ids=token_ids,
        component=component,
        advantages=np.full(len(token_ids), advantage, dtype=np.float32),
        weights=weights,
        behaviour_logprobs=None if behaviour is None else behaviour[:num_tokens],
        prompt_id=row.group.prompt_id,
        source=row.source,
        phase=phase,
        behaviour_spans=None if spans is None else spans[:num_tokens],
    )


class RolloutReader(PeerGroupReader):
    """The part of a regime that gives its groups whole and trains on those of peers."""

    def __init__(self, parameters: PeerGroupParameters, setting: Setting) -> None:
        super().__init__("rollout", parameters, setting)
        self._setting = setting

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Every group, failed ones too: peers need them for their baselines and balance."""
        setting = self._setting
        return [rollout_record(group, author, setting.receiver, own_advantages(group, setting.objective))]

    def take_rollouts(self, groups: Sequence[ScoredGroup]) -> list[list[RolloutRecord]]:
        """For each own group, what peers gave on its prompt."""
        return [rollouts_of(self.peer_groups.take(group.prompt_id)) for group in groups]

    def absorbed(
        self,
        examples: list[TrainingExample],
        denominators: dict[str, float],
        peers: PeerRows,
        *,
        lengths: Sequence[int],
        shared: Sequence[SharedRows],
        counts: dict[str, float] | None = None,
        expansion: float = 1.0,
    ) -> Absorbed:
        """A step with rows of peers of these `lengths` in own tokens, and what it says of them."""
        said = {"sharing/peer_rows": float(len(lengths)), "sharing/peer_tokens": float(sum(lengths))} | (counts or {})
        return Absorbed(
            examples,
            denominators,
            forget=self.peer_groups.take_forgotten(),
            counts=self.peer_groups.take_counts() | said | tried_values(peers.tried) | shared_values(shared),
            shared=shared,
            tried=peers.tried,
            expansion=expansion,
        )
