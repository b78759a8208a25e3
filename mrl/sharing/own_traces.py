"""Own answers in the form that peers can read: the text, its cut by the own tokenizer, and the log-probs of its tokens.

Episodes cross turn by turn: messages and calls as structure, and for each turn of the policy the cut of its tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mrl.alignment.flags import Rejected
from mrl.alignment.peer_answer import PeerAnswer, validate
from mrl.alignment.receiver import Receiver
from mrl.alignment.sampled_answers import describe_answers
from mrl.records.codec import unpack_array
from mrl.records.episodes import CUT, EpisodeSegment
from mrl.records.experience import MAX_COMPLETION_BYTES, RolloutRecord, SharedAnswer, TokenTrace, TracedTurn
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import Float32s
from mrl.sharing.regime import Author, Int32s


class OwnTurn(NamedTuple):
    """A turn of the policy in one of its episodes, of T tokens."""

    token_ids: Int32s
    """[T] own ids."""
    logprobs: Float32s
    """[T] log-probs under the policy, in nats."""
    content: bytes
    finish_reason: FinishReason


def traces_of(answers: Sequence[Answer], receiver: Receiver) -> list[TokenTrace | None]:
    """Return the traces of own answers: their cut by the own tokenizer, and log-probs.

    An answer whose ids do not stand for its completion has None.
    """
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
    """Return the trace of one answer, as `traces_of`."""
    return traces_of([answer], receiver)[0]


def rollout_record(group: ScoredGroup, author: Author, receiver: Receiver, advantages_G: Float32s) -> RolloutRecord:
    """Return a whole own group as peers can read it, with the advantages [G] that its answers have here."""
    plain = [answer for answer in group.answers if not answer.segments and answer_bytes(answer) <= MAX_COMPLETION_BYTES]
    traces = iter(traces_of(plain, receiver))
    answers = [
        _shared_episode(answer, float(advantage), receiver)
        if answer.segments
        else _shared_text(answer, float(advantage), traces)
        for answer, advantage in zip(group.answers, advantages_G, strict=True)
    ]
    return RolloutRecord(**author.tags(group), answers=answers)


def digest_of(text: bytes) -> bytes:
    """Return the digest by which peers see whether they write a turn alike."""
    return hashlib.blake2b(text, digest_size=8).digest()


def _shared_text(answer: Answer, advantage: float, traces: Iterator[TokenTrace | None]) -> SharedAnswer:
    """Return an answer of one turn, with the next trace. An answer with more text than may cross gives its reward
    alone.
    """
    crosses = answer_bytes(answer) <= MAX_COMPLETION_BYTES
    return SharedAnswer(
        completion=answer.completion if crosses else b"",
        finish_reason=answer.finish_reason,
        reward=answer.reward,
        advantage=advantage,
        trace=next(traces) if crosses else None,
    )


def _shared_episode(answer: Answer, advantage: float, receiver: Receiver) -> SharedAnswer:
    """Return one episode, up to the policy's last turn.

    An episode with more text than may cross, or whose turns no peer could write, gives its reward alone.
    """
    crosses = answer_bytes(answer) <= MAX_COMPLETION_BYTES and not answer.is_unsayable
    return SharedAnswer(
        completion=b"",
        finish_reason=last_reason(answer),
        reward=answer.reward,
        advantage=advantage,
        turns=_traced_turns(answer, receiver) if crosses else [],
    )


def answer_bytes(answer: Answer) -> int:
    """Return how many bytes of an own answer's text cross; of an episode, of its turns up to the policy's last."""
    if not answer.segments:
        return len(answer.completion)
    if answer.is_unsayable:
        return 0
    last = max((place for place, segment in enumerate(answer.segments) if segment.is_sampled), default=-1)
    return sum(message.num_bytes for segment in answer.segments[: last + 1] for message in segment.messages)


def last_reason(answer: Answer) -> FinishReason:
    """Return how the last turn of an episode ended."""
    return FinishReason.LENGTH if answer.ending == CUT else FinishReason.STOP


def own_turns(answer: Answer) -> list[OwnTurn]:
    """Return the policy's own turns of an episode."""
    bounds = np.cumsum([segment.num_tokens for segment in answer.segments])[:-1]
    ids = np.split(unpack_array(answer.token_ids, "i4"), bounds)
    own = [place for place, segment in enumerate(answer.segments) if segment.is_sampled]
    sizes = np.cumsum([answer.segments[place].num_tokens for place in own])[:-1]
    logprobs = np.split(unpack_array(answer.logprobs, "f4"), sizes)
    reasons = [FinishReason.STOP] * len(own[:-1]) + [last_reason(answer)] * len(own[-1:])
    return [
        OwnTurn(ids[place], nats, answer.segments[place].messages[0].content.encode(), reason)
        for place, nats, reason in zip(own, logprobs, reasons, strict=True)
    ]


def _traced_turns(answer: Answer, receiver: Receiver) -> list[TracedTurn]:
    """Return the turns of an episode; turns of the policy have the trace of all that it sampled there."""
    turns = own_turns(answer)
    ids, logprobs, _, reasons = zip(*turns, strict=True) if turns else ((), (), (), ())
    described = iter(describe_answers(receiver, ids, logprobs, reasons))
    last = max((place for place, segment in enumerate(answer.segments) if segment.is_sampled), default=-1)
    return [
        _traced_turn(segment, next(described) if segment.is_sampled else None)
        for segment in answer.segments[: last + 1]
    ]


def _traced_turn(segment: EpisodeSegment, sampled: PeerAnswer | None) -> TracedTurn:
    """Return one turn; its trace is left out where the sampled ids do not begin with its content."""
    if sampled is None:
        return TracedTurn(is_sampled=False, messages=segment.messages)
    content = segment.messages[0].content.encode()
    written = b"" if sampled.completion == content else digest_of(sampled.completion)
    trace = _trace(sampled, written) if sampled.completion.startswith(content) else None
    return TracedTurn(is_sampled=True, messages=segment.messages, trace=trace)


def _trace(described: PeerAnswer, written: bytes = b"") -> TokenTrace | None:
    fields = described.fields()
    if isinstance(validate(**fields), Rejected):
        return None
    names = ("byte_lengths", "logprobs", "special", "noncanonical", "token_ids")
    return TokenTrace(**{name: fields[name] for name in names}, written=written)
