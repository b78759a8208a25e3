"""Answers of peers in own tokens, and the training rows that they make.

A trace (how the source's tokenizer cut an answer, and its log-probs) is optional for regimes that only imitate a text,
and needed by regimes that form ratios. A trace that is wrong is counted and not believed; the text itself may still be
used. An imitated text is taken whole: a part that fits the own token limit is an answer that nobody verified.

Shapes: T own tokens of one answer, S of them trained on: in an episode only the peer's turns, and where a ratio to the
peer is formed only the parts that both policies write alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch, AlignedTrace
from mrl.alignment.flags import Flag
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.receiver import Receiver
from mrl.alignment.translate import translate_batch
from mrl.records.experience import OutcomeRecord, RolloutRecord, SharedAnswer, TracedTurn
from mrl.sharing.advantages import Float32s
from mrl.sharing.context import SharingContext
from mrl.sharing.peer_episodes import said_in
from mrl.sharing.peer_turns import NOTHING_SHARED, EpisodeRow, aligned_episodes, believed
from mrl.sharing.regime import WITHHELD, Bools, ExaminedAnswer, Int32s, TrainingExample

CUT = "cut"
"""Reason of a text that is to be imitated and does not fit as a whole into the own token limit."""


class PeerTrace(NamedTuple):
    """One answer of a peer in own tokens."""

    answer: SharedAnswer | OutcomeRecord
    """The answer as the peer sent it, with its reward."""
    examined: ExaminedAnswer
    aligned: AlignedTrace
    """The T own tokens, and the peer's log-probs of the spans that both tokenizers have in common; of an episode only
    the tokens that lie in such spans."""
    row: EpisodeRow | None = None
    """The whole row of an episode that can be used; else None."""
    needs_trace: bool = False
    """Whether only tokens in spans are trained on."""

    @property
    def source(self) -> str:
        """The policy that wrote the answer."""
        return self.examined.source

    @property
    def rejected(self) -> str:
        """Why the answer cannot be used; "" when it can."""
        return self.examined.rejected

    @property
    def is_episode(self) -> bool:
        """Whether the answer has turns."""
        return isinstance(self.answer, SharedAnswer) and bool(self.answer.turns)

    @property
    def completion(self) -> bytes:
        """The bytes of its text; of an episode, all messages as people read them."""
        turns = self.answer.turns if isinstance(self.answer, SharedAnswer) else []
        return said_in(turns).encode(errors="replace") if turns else self.answer.completion

    @property
    def reward(self) -> float:
        """Reward that the peer's verifier gave."""
        return self.answer.reward

    @property
    def advantage(self) -> float:
        """Advantage of the answer in its group at the source; 0 for a success that comes without its group."""
        return self.answer.advantage if isinstance(self.answer, SharedAnswer) else 0.0

    @property
    def is_usable(self) -> bool:
        """Whether the answer may be trained on. Its reward counts in any case: a reward needs no tokenizer."""
        return not self.examined.rejected

    @property
    def num_tokens(self) -> int:
        """S, the trained tokens; 0 for an answer that cannot be expressed in own tokens."""
        return len(self.aligned.token_ids) if self.row is None else int(self._is_trained(self.row).sum())

    @property
    def num_sampled_tokens(self) -> int:
        """Own tokens of all that the peer sampled."""
        return self.num_tokens if self.row is None else int(self.row.is_sampled.sum())

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
        kept: Bools | None = None,
    ) -> TrainingExample:
        """Return the training example of the tokens that are `kept` [S], of all S by default. All have the same
        advantage.

        `behaviour` and `spans` are [S]. Without `weights` the row counts as the mean over its tokens. The row ends with
        the last token that is trained on.
        """
        kept = np.ones(self.num_tokens, dtype=bool) if kept is None else kept
        token_ids, is_trained = self.aligned.token_ids, kept
        if self.row is not None:
            token_ids, is_trained = self.row.token_ids, self._is_trained(self.row).copy()
            is_trained[is_trained] = kept
        end, size = int(np.flatnonzero(is_trained).max(initial=-1)) + 1, int(kept.sum())
        return TrainingExample(
            prompt_token_ids=prompt_token_ids,
            answer_token_ids=token_ids[:end],
            component=component,
            advantages=np.full(size, advantage, dtype=np.float32),
            weights=np.full(size, 1.0 / max(1, size), dtype=np.float32) if weights is None else weights,
            behaviour_logprobs=None if behaviour is None else behaviour[kept],
            prompt_id=self.examined.prompt_id,
            source=self.source,
            phase=phase,
            behaviour_spans=None if spans is None else spans[kept],
            examined=self.examined,
            is_trained=None if is_trained[:end].all() else is_trained[:end],
        )

    def _is_trained(self, row: EpisodeRow) -> Bools:
        """Return [T] whether a token is trained on."""
        return row.is_aligned if self.needs_trace else row.is_sampled


def peer_traces(
    records: Sequence[RolloutRecord | OutcomeRecord], context: SharingContext, *, needs_trace: bool
) -> list[list[PeerTrace]]:
    """Return, for each record, all its answers in own tokens, and give every one to the recorder.

    An answer longer than own answers may be, EOS included, is cut, or rejected where it cannot be cut. With
    `needs_trace` an answer without sound log-probs is not usable. Without it, texts are imitated, and a cut text is not
    usable. Never raises for the contents of records.
    """
    told = [_Told(record, answer) for record in records for answer in _answers_of(record)]
    if not told:
        return []
    one_turn = iter(_of_one_turn([one for one in told if not one.turns], context, needs_trace=needs_trace))
    episodes = iter(_of_episodes([one for one in told if one.turns], context, needs_trace=needs_trace))
    traces = [next(episodes if one.turns else one_turn) for one in told]
    context.recorder.examine(trace.examined for trace in traces)
    in_order = iter(traces)
    return [[next(in_order) for _ in _answers_of(record)] for record in records]


def in_own_tokens(
    answers: Sequence[SharedAnswer | OutcomeRecord], fingerprints: Sequence[str], receiver: Receiver, *, max_tokens: int
) -> tuple[AlignedBatch, list[str]]:
    """Return the answers as rows of own tokens, and for each answer the fault of its trace, "" where it is sound.

    `fingerprints` name the tokenizers that cut the answers. The ids and log-probs of an equal tokenizer pass through
    untouched.
    """
    read = [_read(answer, fingerprint) for answer, fingerprint in zip(answers, fingerprints, strict=True)]
    return translate_batch([answer for answer, _ in read], receiver, max_tokens=max_tokens), [why for _, why in read]


def behaviour_of(row: AlignedTrace) -> tuple[Float32s, npt.NDArray[np.int32]]:
    """Return, for a ratio to the peer, [T] the peer's log-prob of each own token's span, and [T] the number of that
    span.
    """
    return row.span_logprob[row.span_of_token].astype(np.float32), row.span_of_token.astype(np.int32)


def mean_logprobs(row: AlignedTrace) -> Float32s:
    """Return [T] the peer's mean log-prob per peer token of its spans, the same everywhere."""
    mean = row.span_logprob.sum() / max(1, row.span_peer_tokens.sum())
    return np.full(len(row.token_ids), mean, dtype=np.float32)


def ended_text(row: AlignedTrace, turn_spans: Sequence[int] = ()) -> tuple[Bools, float]:
    """Return [T] whether an own token is not the end of a turn, and the peer's mean log-prob without its own ends.

    HACPO's code leaves the end of an answer out of both means (arXiv 2603.02604). `turn_spans` are the spans of each
    turn of an episode. A row of nothing but ends stays whole.
    """
    is_end = np.zeros(len(row.span_bytes), dtype=bool)
    last = np.cumsum([count for count in turn_spans or [len(is_end)] if count], dtype=np.int64) - 1
    is_end[last] = row.span_bytes[last] == 0
    is_text = ~is_end | is_end.all()
    mean = row.span_logprob[is_text].sum() / max(1, row.span_peer_tokens[is_text].sum())
    return is_text[row.span_of_token], float(mean)


def _answers_of(record: RolloutRecord | OutcomeRecord) -> Sequence[SharedAnswer | OutcomeRecord]:
    """Return all answers of a group. An outcome is its one answer itself."""
    return [record] if isinstance(record, OutcomeRecord) else record.answers


class _Told(NamedTuple):
    """One answer, with the record that holds it."""

    record: RolloutRecord | OutcomeRecord
    answer: SharedAnswer | OutcomeRecord

    @property
    def turns(self) -> Sequence[TracedTurn]:
        """Turns of an episode; empty for an answer of one turn."""
        return self.answer.turns if isinstance(self.answer, SharedAnswer) else []

    @property
    def is_withheld(self) -> bool:
        """Whether the author sent the reward alone."""
        return not (isinstance(self.answer, OutcomeRecord) or self.turns or self.answer.completion or self.answer.trace)

    def examined(self, rejected: str, fault: str, batch: AlignedBatch, row: int) -> ExaminedAnswer:
        """Return the answer as the recorder gets it."""
        return ExaminedAnswer(self.record.source, self.record.prompt_id, rejected, fault, batch, row)


def _of_one_turn(told: Sequence[_Told], context: SharingContext, *, needs_trace: bool) -> list[PeerTrace]:
    answers, fingerprints = [one.answer for one in told], [one.record.fingerprint for one in told]
    batch, faults = in_own_tokens(answers, fingerprints, context.receiver, max_tokens=_max_turn_tokens(context))
    is_cut = (batch.flags & Flag.RECV_TRUNC) != 0
    traces = []
    for row, one in enumerate(told):
        unfit = faults[row] if needs_trace else CUT if is_cut[row] else ""
        rejected, fault = batch.reject_reason[row] or unfit, faults[row]
        if one.is_withheld:
            rejected, fault = WITHHELD, ""
        examined = one.examined(rejected, fault, batch, row)
        traces.append(PeerTrace(one.answer, examined, batch.row(row)))
    return traces


def _of_episodes(told: Sequence[_Told], context: SharingContext, *, needs_trace: bool) -> list[PeerTrace]:
    answers = [one.answer for one in told if isinstance(one.answer, SharedAnswer)]
    fingerprints = [one.record.fingerprint for one in told]
    traces = []
    episodes = aligned_episodes(answers, fingerprints, context, max_turn_tokens=_max_turn_tokens(context))
    for one, (batch, place, row, rejected, fault) in zip(told, episodes, strict=True):
        if row is not None and needs_trace:
            rejected = fault or ("" if row.is_aligned.any() else NOTHING_SHARED)
        elif row is not None and batch.flags[place] & Flag.RECV_TRUNC:
            rejected = CUT
        examined = one.examined(rejected, fault, batch, place)
        traces.append(PeerTrace(one.answer, examined, batch.row(place), row, needs_trace))
    return traces


def _max_turn_tokens(context: SharingContext) -> int:
    return context.max_turn_tokens or context.objective.max_answer_tokens


def _read(answer: SharedAnswer | OutcomeRecord, fingerprint: str) -> tuple[PeerAnswer, str]:
    return believed(answer.completion, answer.trace, finish_reason=answer.finish_reason, fingerprint=fingerprint)
