"""Answers of peers in own tokens, and the training rows that they make.

A trace (how the source's tokenizer cut an answer, and its log-probs) is optional for those who only imitate a text, and
needed by those who form ratios. A trace that lies is counted and not believed; the text itself may still be used. Who
imitates a text takes it whole: what the own token limit leaves of it is an answer that nobody verified.

Shapes: T own tokens of one answer.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch, AlignedTrace
from mrl.alignment.flags import Flag, Rejected
from mrl.alignment.peer_answer import PeerAnswer, bare_text, validate
from mrl.alignment.receiver import Receiver
from mrl.alignment.translate import translate_batch
from mrl.records.experience import OutcomeRecord, RolloutRecord, SharedAnswer, TokenTrace
from mrl.records.finish import FinishReason
from mrl.sharing.advantages import Float32s
from mrl.sharing.context import SharingContext
from mrl.sharing.regime import ExaminedAnswer, Int32s, TrainingExample

UNTRACED = "untraced"
"""The source sent no trace, because its ids do not stand for the text."""
CUT = "cut"
"""Of a text that is to be imitated only the beginning has room within the own token limit."""


class AnswerLike(Protocol):
    """What every record says of an answer."""

    @property
    def completion(self) -> bytes:
        """The bytes of the text."""
        ...

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer has no further token."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the answer ended by itself."""
        ...

    @property
    def trace(self) -> TokenTrace | None:
        """How the source's tokenizer cut the text, with log-probs."""
        ...


class PeerTrace(NamedTuple):
    """One answer of a peer in own tokens."""

    answer: SharedAnswer | OutcomeRecord
    """As the peer sent it, with its reward."""
    examined: ExaminedAnswer
    aligned: AlignedTrace
    """The T own tokens, and the peer's log-probs of the spans that both tokenizers have in common."""

    @property
    def source(self) -> str:
        """The policy that wrote the answer."""
        return self.examined.source

    @property
    def rejected(self) -> str:
        """Why the answer cannot be used; "" when it can."""
        return self.examined.rejected

    @property
    def completion(self) -> bytes:
        """The bytes of its text."""
        return self.answer.completion

    @property
    def reward(self) -> float:
        """As the peer's verifier gave it."""
        return self.answer.reward

    @property
    def advantage(self) -> float:
        """The advantage of the answer in its group at the source. 0 for a success that comes without its group."""
        return self.answer.advantage if isinstance(self.answer, SharedAnswer) else 0.0

    @property
    def is_usable(self) -> bool:
        """Whether the answer may be trained on. Its reward counts in any case: a reward needs no tokenizer."""
        return not self.examined.rejected

    @property
    def num_tokens(self) -> int:
        """T. It is 0 for an answer that cannot be expressed in own tokens."""
        return len(self.aligned.token_ids)

    def example(
        self,
        prompt_token_ids: Int32s,
        *,
        component: str,
        advantage: float | np.floating = 0.0,
        weights: Float32s | None = None,
        behaviour: Float32s | None = None,
        spans: Int32s | None = None,
        phase: int = 0,
        num_tokens: int | None = None,
    ) -> TrainingExample:
        """The training example of the first `num_tokens` tokens, of all by default. Every token has the same advantage.

        Without `weights` the row counts as the mean over its tokens.
        """
        token_ids = self.aligned.token_ids[:num_tokens]
        size = len(token_ids)
        return TrainingExample(
            prompt_token_ids=prompt_token_ids,
            answer_token_ids=token_ids,
            component=component,
            advantages=np.full(size, advantage, dtype=np.float32),
            weights=np.full(size, 1.0 / max(1, size), dtype=np.float32) if weights is None else weights,
            behaviour_logprobs=None if behaviour is None else behaviour[:num_tokens],
            prompt_id=self.examined.prompt_id,
            source=self.source,
            phase=phase,
            behaviour_spans=None if spans is None else spans[:num_tokens],
            examined=self.examined,
        )


def peer_traces(
    records: Sequence[RolloutRecord | OutcomeRecord], context: SharingContext, *, needs_trace: bool
) -> list[list[PeerTrace]]:
    """For each record, all its answers in own tokens. The recorder hears of every one.

    An answer longer than own answers may be, EOS included, is cut, or rejected where it cannot be cut. With
    `needs_trace` an answer without sound log-probs is not usable. Without, texts are imitated, and a cut one is not
    usable. Never raises for what records say.
    """
    told = [(record, number, answer) for record in records for number, answer in enumerate(_answers_of(record))]
    if not told:
        return []
    answers, fingerprints = [answer for _, _, answer in told], [record.fingerprint for record, _, _ in told]
    batch, faults = in_own_tokens(
        answers,
        fingerprints,
        context.receiver,
        max_tokens=context.max_turn_tokens or context.objective.max_answer_tokens,
    )
    is_cut = (batch.flags & Flag.RECV_TRUNC) != 0
    traces = []
    for row, (record, number, answer) in enumerate(told):
        unfit = faults[row] if needs_trace else CUT if is_cut[row] else ""
        rejected = batch.reject_reason[row] or unfit
        tags = record.source, record.prompt_id, record.record_id
        examined = ExaminedAnswer(*tags, number, rejected, faults[row], batch, row)
        traces.append(PeerTrace(answer, examined, batch.row(row)))
    context.recorder.examine(trace.examined for trace in traces)
    in_order = iter(traces)
    return [[next(in_order) for _ in _answers_of(record)] for record in records]


def in_own_tokens(
    answers: Sequence[AnswerLike], fingerprints: Sequence[str], receiver: Receiver, *, max_tokens: int
) -> tuple[AlignedBatch, list[str]]:
    """The answers as rows of own tokens, and for each the fault of its trace, "" where it is sound.

    `fingerprints` name the tokenizers that cut the answers. The ids and log-probs of an equal tokenizer pass through
    untouched.
    """
    read = [_read(answer, fingerprint) for answer, fingerprint in zip(answers, fingerprints, strict=True)]
    return translate_batch([answer for answer, _ in read], receiver, max_tokens=max_tokens), [why for _, why in read]


def behaviour_of(row: AlignedTrace) -> tuple[Float32s, npt.NDArray[np.int32]]:
    """[T] the peer's log-prob of each own token's span, and [T] the number of that span, for a ratio to the peer."""
    return row.span_logprob[row.span_of_token].astype(np.float32), row.span_of_token.astype(np.int32)


def mean_logprobs(row: AlignedTrace) -> Float32s:
    """[T] the peer's mean log-prob per peer token of its spans, the same everywhere."""
    mean = row.span_logprob.sum() / max(1, row.span_peer_tokens.sum())
    return np.full(len(row.token_ids), mean, dtype=np.float32)


def ended_text(row: AlignedTrace) -> tuple[int, float]:
    """The number of own tokens without the end, and the peer's mean log-prob without its own end.

    HACPO's code leaves the end of an answer out of both means (arXiv 2603.02604).
    """
    has_end = len(row.span_bytes) > 1 and row.span_bytes[-1] == 0
    spans = slice(0, len(row.span_bytes) - has_end)
    mean = row.span_logprob[spans].sum() / max(1, row.span_peer_tokens[spans].sum())
    return int(row.span_receiver_tokens[spans].sum()), float(mean)


def _answers_of(record: RolloutRecord | OutcomeRecord) -> Sequence[SharedAnswer | OutcomeRecord]:
    """All answers of a group. An outcome is its one answer itself."""
    return [record] if isinstance(record, OutcomeRecord) else record.answers


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
