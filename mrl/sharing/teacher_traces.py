"""Scores of own answers by another policy, assigned to the own tokens that were sampled. These are never cut anew.

Episodes are scored turn by turn. In a turn in which the two families write calls otherwise, only the content is
assigned: own tokens after it have no score, and the teacher's log-probs of its own spelling of the calls are dropped.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from mrl.alignment.aligned_batch import AlignedBatch, Float64s
from mrl.alignment.flags import Flag, Rejected
from mrl.alignment.next_units import NextUnits, decode_units, joined_units, no_units
from mrl.alignment.peer_answer import PeerAnswer, validate
from mrl.alignment.ragged import offsets_of, sums_at
from mrl.alignment.receiver import Receiver
from mrl.alignment.shared_spans import align_batch
from mrl.records.codec import unpack_array
from mrl.records.experience import LikeliestUnits, ScoreRecord, TokenTrace
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import Float32s
from mrl.sharing.context import SharingContext
from mrl.sharing.own_traces import OwnTurn, own_turns
from mrl.sharing.peer_turns import is_written_alike, split_trace
from mrl.sharing.regime import WITHHELD, ExaminedAnswer, Int32s

UNSCORED = "unscored"
"""Reason of a missing score: the teacher could not express the text, or own ids do not stand for it."""


class TeacherTrace(NamedTuple):
    """The score of one own answer of S sampled tokens, with K units a place."""

    logprobs: Float32s
    """[S] teacher's sum over the token's common span, in nats; NaN where it gave none, as for an end that it lacks."""
    spans: Int32s
    """[S] common span of each token."""
    aligned: AlignedBatch
    """The score as one row. An end that only one side has is not in it: the row is flagged EOS_UNMAPPED, the own token
    is left out, the teacher's is dropped."""
    units: NextUnits | None
    """[S, K] units that the teacher finds likeliest, where a span is one token on both sides; None where it told
    none."""


class ExaminedScore(NamedTuple):
    """The score of one own answer, and the same as the recorder gets it."""

    examined: ExaminedAnswer
    trace: TeacherTrace | None
    """The score on own tokens; None for a rejected score."""


class _LaidOn(NamedTuple):
    """An own answer, or own turn, of T tokens, with a score of P tokens that covers its first A tokens in S spans."""

    token_ids: Int32s
    """[T] own ids."""
    token_bytes: Int32s
    """[T] text bytes of every own token."""
    span_of_token: Int32s
    """[A] span of every own token that is scored."""
    told_logprobs: Float32s
    """[P] log-probs that the teacher gave its tokens, in nats."""
    told_bytes: Int32s
    """[P] text bytes of the teacher's tokens."""
    told_span: Int32s
    """[P] span of every token of the teacher; -1 for dropped tokens."""
    num_spans: int
    flags: Flag
    units: NextUnits | None = None

    @property
    def span_logprob(self) -> Float64s:
        """[S] the teacher's log-prob of each span, in nats."""
        is_kept = self.told_span >= 0
        return sums_at(self.told_span[is_kept], self.told_logprobs[is_kept].astype(np.float64), self.num_spans)


def teacher_traces(group: ScoredGroup, record: ScoreRecord, context: SharingContext) -> list[ExaminedScore]:
    """Return the scores of the answers of an own group, one for each. The recorder gets every answer that was asked
    about.

    `record` has as many scores as `num_scores` says.
    """
    found, scores = [], iter(record.scores)
    units = itertools.repeat(None) if record.units is UNSET else iter(record.units)
    tags = record.source, record.prompt_id
    for answer in group.answers:
        size = num_scores([answer])
        of_answer, told = list(itertools.islice(scores, size)), list(itertools.islice(units, size))
        if answer.is_unsayable:
            found.append(ExaminedScore(ExaminedAnswer(*tags, rejected=WITHHELD), None))
            continue
        match teacher_trace(answer, of_answer, record.fingerprint, context.receiver, told):
            case TeacherTrace() as trace:
                found.append(ExaminedScore(ExaminedAnswer(*tags, batch=trace.aligned), trace))
            case Rejected(reason):
                found.append(ExaminedScore(ExaminedAnswer(*tags, rejected=reason, trace_fault=reason), None))
            case None:
                found.append(ExaminedScore(ExaminedAnswer(*tags, rejected=UNSCORED), None))
    context.recorder.examine(score.examined for score in found if score.examined.rejected != WITHHELD)
    return found


def num_scores(answers: Sequence[Answer]) -> int:
    """Return how many scores a teacher gives to own answers: one to each, and to an episode one for every own turn that
    crosses.
    """
    turns = [[] if answer.is_unsayable else answer.segments for answer in answers]
    return sum(sum(segment.is_sampled for segment in of_answer) or 1 for of_answer in turns)


def teacher_trace(
    answer: Answer,
    scores: Sequence[TokenTrace | None],
    fingerprint: str,
    receiver: Receiver,
    units: Sequence[LikeliestUnits | None] = (),
) -> TeacherTrace | Rejected | None:
    """Return the scores of one own answer, aligned with its own tokens; `units` are there for each score, or for none.

    None when the teacher could express nothing of the answer, or own ids do not stand for it; Rejected when a score is
    wrong.
    """
    if answer.segments:
        parts = [_turn(own, score, fingerprint, receiver) for own, score in zip(own_turns(answer), scores, strict=True)]
    else:
        parts = [_whole(answer, scores[0], fingerprint, receiver)]
    laid = list[_LaidOn]()
    for plain, told in zip(parts, units or [None] * len(parts), strict=True):
        part = plain if told is None else _with_units(plain, told, receiver)
        if isinstance(part, Rejected):
            return part
        laid.append(part)
    if not any(part.num_spans for part in laid):
        return None
    logprobs, spans, num_spans = list[Float32s](), list[Int32s](), 0
    for part in laid:
        size, num_scored = len(part.token_ids), len(part.span_of_token)
        of_token, nats = np.full(size, part.num_spans, np.int32), np.full(size, np.nan, np.float32)
        of_token[:num_scored], nats[:num_scored] = part.span_of_token, part.span_logprob[part.span_of_token]
        spans.append(of_token + np.int32(num_spans))
        logprobs.append(nats)
        num_spans += part.num_spans + (num_scored < size)
    own_units = None
    if any(part.units for part in laid):
        own_units = joined_units([part.units or no_units(len(part.token_ids)) for part in laid])
    return TeacherTrace(np.concatenate(logprobs), np.concatenate(spans), _book(laid), own_units)


def _whole(answer: Answer, score: TokenTrace | None, fingerprint: str, receiver: Receiver) -> _LaidOn | Rejected:
    own_ids = unpack_array(answer.token_ids, "i4")
    if score is None or not answer.completion or receiver.completion_bytes(own_ids) != answer.completion:
        return _silent(own_ids, receiver)
    told = _believed(answer.completion, score, answer.finish_reason, fingerprint)
    return told if isinstance(told, Rejected) else _lay_on(own_ids, told, receiver)


def _turn(own: OwnTurn, score: TokenTrace | None, fingerprint: str, receiver: Receiver) -> _LaidOn | Rejected:
    """Return the score of one own turn: of all of it where both policies write it alike, else of its content."""
    text = receiver.completion_bytes(own.token_ids)
    if score is None or not own.token_ids.size:
        return _silent(own.token_ids, receiver)
    if is_written_alike(score, text, own.content):
        told = _believed(text, score, own.finish_reason, fingerprint)
        return told if isinstance(told, Rejected) else _lay_on(own.token_ids, told, receiver)
    parts = split_trace(score, _common(text, own.content), fingerprint=fingerprint)
    return Rejected(parts) if isinstance(parts, str) else _lay_on_content(own.token_ids, *parts, receiver)


def _common(text: bytes, content: bytes) -> bytes:
    """Return the bytes with which both begin; fewer than the content's where the text is no valid UTF-8."""
    both = zip(text, content, strict=False)
    return text[: next((place for place, (one, other) in enumerate(both) if one != other), len(content))]


def _believed(text: bytes, score: TokenTrace, finish_reason: FinishReason, fingerprint: str) -> PeerAnswer | Rejected:
    return validate(
        completion=text,
        byte_lengths=score.byte_lengths,
        logprobs=score.logprobs,
        special=score.special,
        finish_reason=finish_reason,
        fingerprint=fingerprint,
    )


def _with_units(part: _LaidOn | Rejected, told: LikeliestUnits, receiver: Receiver) -> _LaidOn | Rejected:
    """Return the part with units at spans of one token on both sides: there both policies faced the same choice."""
    if isinstance(part, Rejected) or not part.num_spans:
        return part
    units = decode_units(told, part.told_span.size, receiver, end_id=_own_end(part.token_ids, receiver))
    if isinstance(units, Rejected):
        return units
    is_kept = part.told_span >= 0
    num_own = np.bincount(part.span_of_token, minlength=part.num_spans)
    num_told = np.bincount(part.told_span[is_kept], minlength=part.num_spans)
    is_one = (num_own == 1) & (num_told == 1)
    own_at = np.flatnonzero(is_one[part.span_of_token])
    told_at = np.flatnonzero(is_kept & is_one[part.told_span])
    return part._replace(units=units.at(told_at, own_at, len(part.token_ids)))


def _own_end(own_ids: Int32s, receiver: Receiver) -> int | None:
    """Return the end of an own answer. Where the answer was cut and could have had one of several ends, none stands for
    all of them: own ends are left to the rest, and so is the teacher's.
    """
    last, ends = int(own_ids[-1]), receiver.eos_ids
    if last in ends:
        return last
    return ends[0] if len(ends) == 1 else None


def _silent(own_ids: Int32s, receiver: Receiver) -> _LaidOn:
    """Return own tokens to which the teacher gives no score."""
    none, no_logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return _LaidOn(own_ids, _lengths(own_ids, receiver), none, no_logprobs, none, none, 0, Flag(0))


def _lay_on(own_ids: Int32s, told: PeerAnswer, receiver: Receiver) -> _LaidOn:
    """Return own tokens with a score of the same text. An end on both sides is one virtual byte. An own end alone has
    no score.
    """
    own_lengths, num_own, num_told = _lengths(own_ids, receiver), len(own_ids), len(told.byte_lengths)
    has_own_end = int(own_ids[-1]) in receiver.eos_ids
    lengths, told_lengths = own_lengths.copy(), told.byte_lengths.copy()
    if has_own_end and told.ends_with_eos:
        lengths[-1] = told_lengths[-1] = 1
    num_own -= has_own_end and not told.ends_with_eos
    num_told -= told.ends_with_eos and not has_own_end
    if not lengths[:num_own].any() or not told_lengths[:num_told].any():  # specials alone stand for nothing
        num_own = num_told = 0
    flags = Flag(0) if told.finished else Flag.TAIL
    flags |= Flag.EOS_UNMAPPED if has_own_end != told.ends_with_eos else Flag(0)
    return _laid(own_ids, own_lengths, told, lengths[:num_own], told_lengths[:num_told], flags=flags)


def _lay_on_content(own_ids: Int32s, content: PeerAnswer | None, unsaid: PeerAnswer, receiver: Receiver) -> _LaidOn:
    """Return own tokens of a turn with the score of its `content`, which alone both write alike: up to the last place
    where both cut it.
    """
    own_lengths = _lengths(own_ids, receiver)
    lengths = np.zeros(0, np.int32) if content is None else content.byte_lengths
    own_ends, ends = np.cumsum(own_lengths), np.cumsum(lengths)
    common = max(np.intersect1d(own_ends, ends).tolist(), default=0)
    num_own, num_told = ((np.searchsorted(of, common) + 1 if common else 0) for of in (own_ends, ends))
    told = unsaid if content is None else _joined(content, unsaid)
    return _laid(own_ids, own_lengths, told, own_lengths[:num_own], lengths[:num_told], flags=Flag(0))


def _joined(first: PeerAnswer, second: PeerAnswer) -> PeerAnswer:
    return replace(
        second,
        completion=first.completion + second.completion,
        byte_lengths=np.concatenate([first.byte_lengths, second.byte_lengths]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        special=np.concatenate([first.special, second.special]),
    )


def _laid(
    own_ids: Int32s, own_lengths: Int32s, told: PeerAnswer, lengths: Int32s, told_lengths: Int32s, *, flags: Flag
) -> _LaidOn:
    """Return the first tokens of both sides, of these `lengths`, in common spans; drop the score's other tokens."""
    spans = align_batch(
        told_lengths, offsets_of(np.array([told_lengths.size])), lengths, offsets_of(np.array([lengths.size]))
    )
    num_dropped = len(told.byte_lengths) - told_lengths.size
    told_span = np.append(spans.of_peer, np.full(num_dropped, -1, dtype=np.int32))
    return _LaidOn(
        own_ids, own_lengths, spans.of_receiver, told.logprobs, told.byte_lengths, told_span, spans.num_spans, flags
    )


def _lengths(own_ids: Int32s, receiver: Receiver) -> Int32s:
    return receiver.byte_lengths(own_ids, offsets_of(np.array([len(own_ids)])))


def _book(parts: Sequence[_LaidOn]) -> AlignedBatch:
    """Return the parts end to end as one row. Own tokens without a span are not in it."""
    own_ids = np.concatenate([part.token_ids[: len(part.span_of_token)] for part in parts])
    own_bytes = np.concatenate([part.token_bytes[: len(part.span_of_token)] for part in parts])
    before = offsets_of(np.array([part.num_spans for part in parts])).astype(np.int32)
    span_of_token = np.concatenate([part.span_of_token + first for part, first in zip(parts, before, strict=False)])
    peer_span = np.concatenate(
        [np.where(part.told_span < 0, -1, part.told_span + first) for part, first in zip(parts, before, strict=False)]
    ).astype(np.int32)
    peer_logprobs = np.concatenate([part.told_logprobs for part in parts])
    nats, is_dropped, num_spans = peer_logprobs.astype(np.float64), peer_span < 0, int(before[-1])
    flags = Flag(0)
    for part in parts:
        flags |= part.flags
    return AlignedBatch(
        token_ids=own_ids,
        row_offsets=np.array([0, len(own_ids)]),
        token_bytes=own_bytes,
        span_of_token=span_of_token,
        peer_offsets=np.array([0, len(nats)]),
        peer_logprobs=peer_logprobs,
        peer_token_bytes=np.concatenate([part.told_bytes for part in parts]),
        peer_span_of_token=peer_span,
        span_row=np.zeros(num_spans, dtype=np.int32),
        span_logprob=np.concatenate([part.span_logprob for part in parts]),
        span_peer_tokens=np.bincount(peer_span[~is_dropped], minlength=num_spans).astype(np.int32),
        span_receiver_tokens=np.bincount(span_of_token, minlength=num_spans).astype(np.int32),
        span_bytes=sums_at(span_of_token, own_bytes, num_spans).astype(np.int32),
        flags=np.array([flags], dtype=np.int32),
        reject_reason=("",),
        dropped_logprob=np.array([nats[is_dropped].sum()]),
        dropped_tokens=np.array([is_dropped.sum()]),
        peer_logprob=np.array([nats.sum()]),
    )
