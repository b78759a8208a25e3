"""Scores of own answers by another policy, laid on the own tokens that were sampled. These are never cut anew."""

from typing import NamedTuple

import numpy as np

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.flags import Flag, Rejected
from mrl.alignment.peer_answer import PeerAnswer, validate
from mrl.alignment.ragged import offsets_of, sums_at
from mrl.alignment.receiver import Receiver
from mrl.alignment.shared_spans import Spans, align_batch
from mrl.records.codec import unpack_array
from mrl.records.experience import ScoreRecord, TokenTrace
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import Float32s
from mrl.sharing.context import SharingContext
from mrl.sharing.regime import ExaminedAnswer, Int32s

UNSCORED = "unscored"
"""The teacher could not express the text, or own ids do not stand for it."""


class TeacherTrace(NamedTuple):
    """The score of one own answer of T tokens."""

    logprobs: Float32s
    """[T] sum over the token's common span, in nats; NaN where the teacher says nothing, as of an end that it lacks."""
    spans: Int32s
    """[T]"""
    aligned: AlignedBatch
    """The same as one row. An end that only one side has is not in it: the row is flagged EOS_UNMAPPED, the own token
    is left out, the teacher's is dropped."""


class ExaminedScore(NamedTuple):
    """The score of one own answer, and what the recorder knows of it."""

    examined: ExaminedAnswer
    trace: TeacherTrace | None
    """None for a score that is rejected."""


def teacher_traces(group: ScoredGroup, record: ScoreRecord, context: SharingContext) -> list[ExaminedScore]:
    """The scores of the answers of an own group, one for each. The recorder hears of every one."""
    scores = []
    for number, (answer, score) in enumerate(zip(group.answers, record.scores, strict=True)):
        tags = record.source, record.prompt_id, record.record_id, number
        match teacher_trace(answer, score, record.fingerprint, context.receiver):
            case TeacherTrace() as trace:
                scores.append(ExaminedScore(ExaminedAnswer(*tags, batch=trace.aligned), trace))
            case Rejected(reason):
                scores.append(ExaminedScore(ExaminedAnswer(*tags, rejected=reason, trace_fault=reason), None))
            case None:
                scores.append(ExaminedScore(ExaminedAnswer(*tags, rejected=UNSCORED), None))
    context.recorder.examine(score.examined for score in scores)
    return scores


def teacher_trace(
    answer: Answer, score: TokenTrace | None, fingerprint: str, receiver: Receiver
) -> TeacherTrace | Rejected | None:
    """The score of one own answer, aligned with its own tokens.

    None when the teacher could not express the text, or own ids do not stand for it; Rejected when the score lies.
    """
    own_ids = unpack_array(answer.token_ids, "i4")
    if score is None or not answer.completion or receiver.completion_bytes(own_ids) != answer.completion:
        return None
    own_lengths = receiver.byte_lengths(own_ids, offsets_of(np.array([len(own_ids)])))
    told = validate(
        completion=answer.completion,
        byte_lengths=score.byte_lengths,
        logprobs=score.logprobs,
        special=score.special,
        finish_reason=answer.finish_reason,
        fingerprint=fingerprint,
    )
    return told if isinstance(told, Rejected) else _lay_on(own_ids, own_lengths, told, receiver)


def _lay_on(own_ids: Int32s, own_lengths: Int32s, told: PeerAnswer, receiver: Receiver) -> TeacherTrace:
    """The score on own tokens. An end on both sides is one virtual byte. An own end alone has no score."""
    num_own, num_told = len(own_ids), len(told.byte_lengths)
    has_own_end = int(own_ids[-1]) in receiver.eos_ids
    lengths, told_lengths = own_lengths.copy(), told.byte_lengths.copy()
    if has_own_end and told.ends_with_eos:
        lengths[-1] = told_lengths[-1] = 1
    num_own -= has_own_end and not told.ends_with_eos
    num_told -= told.ends_with_eos and not has_own_end
    spans = align_batch(told_lengths[:num_told], np.array([0, num_told]), lengths[:num_own], np.array([0, num_own]))
    flags = Flag(0) if told.finished else Flag.TAIL
    flags |= Flag.EOS_UNMAPPED if has_own_end != told.ends_with_eos else Flag(0)
    aligned = _book(own_ids[:num_own], own_lengths[:num_own], told, spans, flags)
    logprobs = np.full(len(own_ids), np.nan, dtype=np.float32)
    logprobs[:num_own] = aligned.span_logprob[spans.of_receiver]
    of_token = np.full(len(own_ids), spans.num_spans, dtype=np.int32)
    of_token[:num_own] = spans.of_receiver
    return TeacherTrace(logprobs, of_token, aligned)


def _book(own_ids: Int32s, own_lengths: Int32s, told: PeerAnswer, spans: Spans, flags: Flag) -> AlignedBatch:
    """One row with every log-prob of the teacher in a span. That of an end that `spans` lacks is dropped."""
    num_told, num_spans = len(spans.of_peer), spans.num_spans
    nats, dropped = told.logprobs.astype(np.float64), len(told.logprobs) - num_told
    return AlignedBatch(
        token_ids=own_ids,
        row_offsets=np.array([0, len(own_ids)]),
        token_bytes=own_lengths,
        span_of_token=spans.of_receiver,
        peer_offsets=np.array([0, len(nats)]),
        peer_logprobs=told.logprobs,
        peer_token_bytes=told.byte_lengths,
        peer_span_of_token=np.append(spans.of_peer, np.full(dropped, -1, dtype=np.int32)),
        span_row=np.zeros(num_spans, dtype=np.int32),
        span_logprob=sums_at(spans.of_peer, nats[:num_told], num_spans),
        span_peer_tokens=np.bincount(spans.of_peer, minlength=num_spans).astype(np.int32),
        span_receiver_tokens=np.bincount(spans.of_receiver, minlength=num_spans).astype(np.int32),
        span_bytes=sums_at(spans.of_receiver, own_lengths, num_spans).astype(np.int32),
        flags=np.array([flags], dtype=np.int32),
        reject_reason=("",),
        dropped_logprob=np.array([nats[num_told:].sum()]),
        dropped_tokens=np.array([dropped]),
        peer_logprob=np.array([nats.sum()]),
    )
