"""Answers of peers in own tokens, and own answers as peers can read them: the sharing side of alignment.

A trace (how the source's tokenizer cut an answer, and its log-probs) is optional for those who only imitate a text, and
needed by those who form ratios. A trace that lies is counted and not believed; the text itself may still be used.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch, AlignedTrace
from mrl.alignment.flags import Rejected
from mrl.alignment.peer_answer import PeerAnswer, bare_text, validate
from mrl.alignment.receiver import Receiver
from mrl.alignment.sampled_answers import describe_answers
from mrl.alignment.translate import translate_batch
from mrl.records.codec import unpack_array
from mrl.records.experience import RolloutRecord, SharedAnswer, TokenTrace
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import Float32s
from mrl.sharing.regime import Author

UNTRACED = "untraced"
"""The source sent no trace, because its ids do not stand for the text."""


class AnswerLike(Protocol):
    """What every record says of an answer."""

    @property
    def completion(self) -> bytes:
        """Its bytes."""
        ...

    @property
    def finish_reason(self) -> FinishReason:
        """Why it has no further token."""
        ...

    @property
    def finished(self) -> bool:
        """Whether it ended by itself."""
        ...

    @property
    def trace(self) -> TokenTrace | None:
        """How the source cut it."""
        ...


class Carried(NamedTuple):
    """R answers of one peer in own tokens."""

    batch: AlignedBatch
    trace_faults: tuple[str, ...]
    """[R] "" where the trace is believed; otherwise why there is none: "untraced", or the reason of its rejection."""

    def reason(self, row: int, *, needs_trace: bool) -> str:
        """Why a row cannot be used; "" when it can."""
        return self.batch.reject_reason[row] or (self.trace_faults[row] if needs_trace else "")


def carry(
    answers: Sequence[AnswerLike], fingerprints: Sequence[str], receiver: Receiver, *, max_tokens: int
) -> Carried:
    """Answers, each cut by the tokenizer of its fingerprint, in the receiver's tokens. Never raises for what they say.

    Equal fingerprints pass ids and log-probs through untouched.
    """
    read = [_read(answer, fingerprint) for answer, fingerprint in zip(answers, fingerprints, strict=True)]
    batch = translate_batch([answer for answer, _ in read], receiver, max_tokens=max_tokens)
    return Carried(batch, tuple(fault for _, fault in read))


def _read(answer: AnswerLike, fingerprint: str) -> tuple[PeerAnswer, str]:
    trace = answer.trace
    if trace is None:
        return bare_text(answer.completion, finished=answer.finished), UNTRACED
    checked = validate(
        completion=answer.completion,
        byte_lengths=trace.byte_lengths,
        logprobs=trace.logprobs,
        special=trace.special,
        finish_reason=answer.finish_reason,
        fingerprint=fingerprint,
        token_ids=trace.token_ids,
        noncanonical=trace.noncanonical,
    )
    if isinstance(checked, Rejected):
        return bare_text(answer.completion, finished=answer.finished), checked.reason
    return checked, ""


def traces_of(answers: Sequence[Answer], receiver: Receiver) -> list[TokenTrace | None]:
    """How the own tokenizer cut own answers; None for one whose ids do not stand for its completion."""
    described = describe_answers(
        receiver,
        [unpack_array(answer.token_ids, "i4") for answer in answers],
        [unpack_array(answer.logprobs, "f4") for answer in answers],
        [answer.finish_reason for answer in answers],
    )
    return [
        _trace(found) if found.completion == answer.completion else None
        for answer, found in zip(answers, described, strict=True)
    ]


def trace_of(answer: Answer, receiver: Receiver) -> TokenTrace | None:
    """`traces_of` for one answer."""
    return traces_of([answer], receiver)[0]


def _trace(described: PeerAnswer) -> TokenTrace | None:
    fields = described.fields()
    if isinstance(validate(**fields), Rejected):
        return None
    names = ("byte_lengths", "logprobs", "special", "noncanonical", "token_ids")
    return TokenTrace(**{name: fields[name] for name in names})


def rollout_record(group: ScoredGroup, author: Author, receiver: Receiver, advantages_G: Float32s) -> RolloutRecord:
    """A whole own group as peers can read it, with the advantages that it has at its source."""
    answers = [
        SharedAnswer(
            completion=answer.completion,
            finish_reason=answer.finish_reason,
            reward=answer.reward,
            advantage=float(advantage),
            trace=trace,
        )
        for answer, advantage, trace in zip(
            group.answers, advantages_G, traces_of(group.answers, receiver), strict=True
        )
    ]
    return RolloutRecord(
        **author.tags(group),
        answers=answers,
    )


def behaviour_of(row: AlignedTrace) -> tuple[Float32s, npt.NDArray[np.int32]]:
    """[T] the peer's log-prob of the span of each own token, and [T] the spans: what a ratio to the peer needs."""
    return row.span_logprob[row.span_of_token].astype(np.float32), row.span_of_token.astype(np.int32)


def mean_logprobs(row: AlignedTrace) -> Float32s:
    """[T] the peer's mean log-prob per peer token of its spans, the same everywhere."""
    mean = row.span_logprob.sum() / max(1, row.span_peer_tokens.sum())
    return np.full(len(row.token_ids), mean, dtype=np.float32)


def ended_text(row: AlignedTrace) -> tuple[int, float]:
    """Own tokens without the end, and the peer's mean log-prob without its own end.

    HACPO's code leaves the end of an answer out of both means (arXiv 2603.02604).
    """
    has_end = len(row.span_bytes) > 1 and row.span_bytes[-1] == 0
    spans = slice(0, len(row.span_bytes) - has_end)
    mean = row.span_logprob[spans].sum() / max(1, row.span_peer_tokens[spans].sum())
    return int(row.span_receiver_tokens[spans].sum()), float(mean)
