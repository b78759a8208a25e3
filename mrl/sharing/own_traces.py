"""Own answers as peers can read them: the text, how the own tokenizer cut it, and the log-probs of its tokens."""

from collections.abc import Sequence

from mrl.alignment.flags import Rejected
from mrl.alignment.peer_answer import PeerAnswer, validate
from mrl.alignment.receiver import Receiver
from mrl.alignment.sampled_answers import describe_answers
from mrl.records.codec import unpack_array
from mrl.records.experience import RolloutRecord, SharedAnswer, TokenTrace
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import Float32s
from mrl.sharing.regime import Author


def traces_of(answers: Sequence[Answer], receiver: Receiver) -> list[TokenTrace | None]:
    """The traces of own answers: how the own tokenizer cut them, and log-probs.

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
    """`traces_of` for one answer."""
    return traces_of([answer], receiver)[0]


def rollout_record(group: ScoredGroup, author: Author, receiver: Receiver, advantages_G: Float32s) -> RolloutRecord:
    """A whole own group as peers can read it, with the advantages [G] that its answers have here."""
    told = zip(group.answers, advantages_G, traces_of(group.answers, receiver), strict=True)
    answers = [
        SharedAnswer(
            completion=answer.completion,
            finish_reason=answer.finish_reason,
            reward=answer.reward,
            advantage=float(advantage),
            trace=trace,
        )
        for answer, advantage, trace in told
    ]
    return RolloutRecord(**author.tags(group), answers=answers)


def _trace(described: PeerAnswer) -> TokenTrace | None:
    fields = described.fields()
    if isinstance(validate(**fields), Rejected):
        return None
    names = ("byte_lengths", "logprobs", "special", "noncanonical", "token_ids")
    return TokenTrace(**{name: fields[name] for name in names})
