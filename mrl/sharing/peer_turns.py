"""Episodes of peers in own tokens, aligned turn by turn, for PRP, HACPO and GRAFT.

    the peer sampled   content          | calls, in its syntax  | its end
    shared             content, and the end of a turn without calls; all, where both write the calls alike
    own turn           content          | calls, in own syntax  | own end

Spans lie within the shared part of one turn. Tokens that the peer sampled after it are booked as dropped. Own tokens
after it stand in the row, so that the policy sees whole turns, and so do those between turns. They have no ratio to the
peer, and are not trained on where one is formed.

Shapes: T own tokens of an episode after its prompt, S of them trained on.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.flags import Flag, Reason, Rejected
from mrl.alignment.peer_answer import PeerAnswer, bare_text, validate
from mrl.alignment.selection import RowPart, join_rows
from mrl.alignment.translate import translate_batch
from mrl.errors import RecordError
from mrl.records.codec import unpack_array
from mrl.records.experience import MAX_COMPLETION_BYTES, SharedAnswer, TokenTrace, TracedTurn
from mrl.records.finish import FinishReason
from mrl.sharing.context import SharingContext
from mrl.sharing.own_traces import digest_of
from mrl.sharing.peer_episodes import EpisodeRenderer
from mrl.sharing.regime import Bools, Int32s

UNTRACED = "untraced"
"""Trace fault: the source sent no trace, because its ids do not stand for the text."""
NOTHING_SHARED = "nothing_shared"
"""Reason of an episode in which nothing that the peer sampled is written alike here."""


class EpisodeRow(NamedTuple):
    """An episode as a training row."""

    token_ids: Int32s
    """[T] own ids of the episode."""
    is_sampled: Bools
    """[T] whether a token belongs to a turn of the peer."""
    is_aligned: Bools
    """[T] whether a token lies in a span, and has a log-prob of the peer: these are the tokens of the aligned trace, in
    order."""
    turn_spans: tuple[int, ...]
    """Number of spans of each turn."""


class AlignedEpisode(NamedTuple):
    """One episode of a peer, aligned, or the reason why it cannot be used."""

    batch: AlignedBatch
    """Batch that holds the shared parts of the episode's turns, end to end, as row `place`."""
    place: int
    row: EpisodeRow | None
    """The episode as a training row; None where it cannot be used."""
    rejected: str
    """Why the episode cannot be used; "" when it can."""
    trace_fault: str
    """Why the source's log-probs are not believed, or are not there; "" when they are sound."""


class PeerTurn(NamedTuple):
    """One turn of a peer, made ready for the alignment."""

    shared: PeerAnswer | None
    """The part that both policies write alike, with its trace; None where it is empty."""
    unsaid: PeerAnswer | None = None
    """Tokens that the peer sampled after the shared part."""
    rest: bytes | None = None
    """Text that the policy itself writes after the shared part, before its end; None where both write the whole turn
    alike."""
    fault: str = ""
    """Fault of the peer's trace; "" where it is sound."""


def aligned_episodes(
    answers: Sequence[SharedAnswer], fingerprints: Sequence[str], context: SharingContext, *, max_turn_tokens: int
) -> list[AlignedEpisode]:
    """Return the episodes in own tokens, all in one batch; `fingerprints` name the tokenizers that cut them. Never
    raises.

    Reasons of rejection: "no_spelling" in a policy without episodes; what `EpisodeRenderer` cannot write, by its word;
    "malformed" turns; "size" for more text than may cross; "too_long" for a turn beyond `max_turn_tokens` that is not
    the last, or not written alike; and what alignment rejects in any turn.
    """
    if not answers:
        return []
    renderer = context.renderer
    read = [_read(one, print_, renderer) for one, print_ in zip(answers, fingerprints, strict=True)]
    turns_of = [[] if isinstance(turns, str) else turns for turns in read]
    shared = [turn.shared for turns in turns_of for turn in turns if turn.shared is not None]
    batch = translate_batch(shared, context.receiver, max_tokens=max_turn_tokens)
    places = itertools.count()
    parts = [[RowPart(None if one.shared is None else next(places), one.unsaid) for one in turns] for turns in turns_of]
    joined = join_rows(batch, parts)
    found = []
    for place, (answer, of_row) in enumerate(zip(answers, parts, strict=True)):
        turns, reason = read[place], joined.reject_reason[place]
        if isinstance(turns, str) or renderer is None:
            found.append(AlignedEpisode(joined, place, None, str(turns), ""))
            continue
        said = [_said(batch, part) for part in of_row]
        row = reason or _row(answer, turns, said, renderer, max_turn_tokens=max_turn_tokens)
        fault = next((turn.fault for turn in turns if turn.fault), "")
        usable, why = (None, row) if isinstance(row, str) else (row, "")
        found.append(AlignedEpisode(joined, place, usable, why, fault))
    return found


def is_written_alike(trace: TokenTrace, text: bytes, content: bytes) -> bool:
    """Whether the trace of a turn with this content is a trace of this text."""
    return trace.written == digest_of(text) if trace.written else text == content


def believed(
    completion: bytes, trace: TokenTrace | None, *, finish_reason: FinishReason, fingerprint: str
) -> tuple[PeerAnswer, str]:
    """Return a text with its trace, and ""; where the trace is missing or wrong, the bare text, and why."""
    finished = finish_reason is FinishReason.STOP
    if trace is None:
        return bare_text(completion, finished=finished), UNTRACED
    checked = validate(
        completion=completion,
        byte_lengths=trace.byte_lengths,
        logprobs=trace.logprobs,
        special=trace.special,
        finish_reason=finish_reason,
        fingerprint=fingerprint,
        token_ids=trace.token_ids,
        noncanonical=trace.noncanonical,
    )
    if isinstance(checked, Rejected):
        return bare_text(completion, finished=finished), checked.reason
    return checked, ""


def _read(answer: SharedAnswer, fingerprint: str, renderer: EpisodeRenderer | None) -> list[PeerTurn] | str:
    """Return the turns of the peer, or why they cannot be used."""
    if renderer is None:
        return "no_spelling"
    if len(answer.turns) % 2 == 0 or any(one.is_sampled is not (n % 2 == 0) for n, one in enumerate(answer.turns)):
        return "malformed"
    if sum(message.num_bytes for turn in answer.turns for message in turn.messages) > MAX_COMPLETION_BYTES:
        return "size"
    own = answer.turns[::2]
    reasons = [FinishReason.STOP] * (len(own) - 1) + [answer.finish_reason]
    found = []
    for turn, reason in zip(own, reasons, strict=True):
        text = renderer.text(turn.messages)
        if isinstance(text, str):
            return text
        found.append(_turn(turn, text, finish_reason=reason, fingerprint=fingerprint))
    return found


def _turn(turn: TracedTurn, text: bytes, *, finish_reason: FinishReason, fingerprint: str) -> PeerTurn:
    """Return a turn of the peer, which the policy itself would write as `text`."""
    content = turn.messages[0].content.encode()
    if turn.trace is None or is_written_alike(turn.trace, text, content):
        whole, fault = believed(text, turn.trace, finish_reason=finish_reason, fingerprint=fingerprint)
        return PeerTurn(whole, fault=fault)
    split = split_trace(turn.trace, content if text.startswith(content) else b"", fingerprint=fingerprint)
    if isinstance(split, str):
        return PeerTurn(bare_text(text, finished=finish_reason is FinishReason.STOP), fault=split)
    shared, unsaid = split
    return PeerTurn(shared, unsaid, text[0 if shared is None else len(shared.completion) :])


def split_trace(trace: TokenTrace, common: bytes, *, fingerprint: str) -> tuple[PeerAnswer | None, PeerAnswer] | Reason:
    """Return the tokens that lie within `common`, up to the end of a character, and the others; or what is wrong with
    them.
    """
    try:
        lengths, logprobs = unpack_array(trace.byte_lengths, "i4"), unpack_array(trace.logprobs, "f4")
        ids = None if trace.token_ids is None else unpack_array(trace.token_ids, "i4")
    except RecordError:
        return "type"
    ends = np.cumsum(lengths, dtype=np.int64)
    if lengths.size == 0 or lengths.min() < 0 or ends[-1] > MAX_COMPLETION_BYTES:
        return "lengths"
    num_shared = _num_within(common, lengths, ends)
    num_bytes = int(ends[num_shared - 1]) if num_shared else 0
    shared = validate(
        completion=common[:num_bytes],
        byte_lengths=lengths[:num_shared],
        logprobs=logprobs[:num_shared],
        special=trace.special[:num_shared],
        finish_reason=FinishReason.LENGTH,
        fingerprint=fingerprint,
        token_ids=None if ids is None else ids[:num_shared],
        noncanonical=trace.noncanonical,
    )
    unsaid = validate(
        completion=bytes(int(ends[-1]) - num_bytes),  # zeros: the text is not known here, and does not matter
        byte_lengths=lengths[num_shared:],
        logprobs=logprobs[num_shared:],
        special=trace.special[num_shared:],
        finish_reason=FinishReason.LENGTH,
        fingerprint=fingerprint,
    )
    for part in (shared, unsaid):
        if isinstance(part, Rejected):
            return part.reason
    assert isinstance(shared, PeerAnswer), "none was rejected"
    assert isinstance(unsaid, PeerAnswer), "none was rejected"
    return (shared if num_shared else None), unsaid


def _num_within(common: bytes, lengths: Int32s, ends: npt.NDArray[np.int64]) -> int:
    """Return the number of tokens up to the last one with bytes that ends in `common`, after a whole character."""
    within = np.flatnonzero((lengths > 0) & (ends <= len(common)))
    for place in within[::-1].tolist():
        if ends[place] == len(common) or common[ends[place]] & 0xC0 != 0x80:
            return int(place) + 1
    return 0


class _SharedPart(NamedTuple):
    """The part of one turn that both policies write alike, in own tokens."""

    token_ids: Int32s
    num_spans: int
    is_short: bool
    """Whether the own token limit has cut it."""


def _said(batch: AlignedBatch, part: RowPart) -> _SharedPart:
    if part.row is None:
        return _SharedPart(np.zeros(0, np.int32), 0, is_short=False)
    first, end = np.searchsorted(batch.span_row, [part.row, part.row + 1]).tolist()
    ids = batch.token_ids[batch.row_offsets[part.row] : batch.row_offsets[part.row + 1]]
    return _SharedPart(ids, end - first, bool(batch.flags[part.row] & Flag.RECV_TRUNC))


def _row(
    answer: SharedAnswer,
    turns: Sequence[PeerTurn],
    shared: Sequence[_SharedPart],
    renderer: EpisodeRenderer,
    *,
    max_turn_tokens: int,
) -> EpisodeRow | str:
    """Return the episode around the shared parts of its turns, or why there is none."""
    said, is_aligned = list[Int32s](), list[Bools]()
    for number, (turn, part) in enumerate(zip(turns, shared, strict=True), 1):
        ids, is_last = part.token_ids, number == len(turns)
        if turn.rest is not None:
            is_ended = not is_last or answer.finish_reason is FinishReason.STOP
            rest = renderer.rest(turn.rest, is_begun=ids.size > 0, is_ended=is_ended)
            ids = np.concatenate([ids, rest])
        if ids.size > max_turn_tokens or (part.is_short and not (is_last and turn.rest is None)):
            return "too_long"
        said.append(ids)
        is_aligned.append(np.arange(ids.size) < part.token_ids.size)
    spelled = renderer.join(answer.turns, said)
    if isinstance(spelled, str):
        return spelled
    aligned_T = np.zeros(spelled.token_ids.size, dtype=bool)
    aligned_T[spelled.is_sampled] = np.concatenate(is_aligned)
    return EpisodeRow(spelled.token_ids, spelled.is_sampled, aligned_T, tuple(part.num_spans for part in shared))
