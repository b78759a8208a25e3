"""Answers that cross: believed, lying and missing traces, the way of equal tokenizers, and ends."""

import numpy as np
import pytest
from msgspec import structs

from mrl.records.codec import pack_array, unpack_array
from mrl.records.experience import SharedAnswer
from mrl.records.finish import FinishReason
from mrl.sharing.carried import UNTRACED, behaviour_of, carry, ended_text, mean_logprobs, trace_of
from tests.support.retokenizing import retokenize

TEXT = b"reverse: yah"


@pytest.fixture
def sampled(make, peer):
    """One answer of the peer, by default -0.5 nats a token."""

    def sampled(text=TEXT, *, source=peer, finished=True, logprobs=-0.5):
        return make.sampled(source, [1.0], texts=[text], finished=finished, logprobs=logprobs).answers[0]

    return sampled


def shared(answer, trace):
    return SharedAnswer(
        completion=answer.completion, finish_reason=answer.finish_reason, reward=1.0, advantage=0.5, trace=trace
    )


def test_trace_says_how_the_source_cut(peer, sampled):
    """One length, log-prob, mark and id per token, EOS included."""
    answer = sampled()
    trace = trace_of(answer, peer)
    assert trace.byte_lengths == pack_array([1] * len(TEXT) + [0], "i4")
    assert trace.logprobs == pack_array([-0.5] * (len(TEXT) + 1), "f4")
    assert trace.special == bytes(len(TEXT)) + b"\1"
    assert trace.token_ids == answer.token_ids
    assert not trace.noncanonical


def test_answer_whose_ids_are_another_text_has_no_trace(peer, sampled):
    """A worker that strips something from the text sends none rather than a wrong one."""
    assert trace_of(structs.replace(sampled(), completion=b"reverse:"), peer) is None


def test_answer_with_impossible_log_probs_has_no_trace(peer, sampled):
    """What no receiver would believe is not sent."""
    assert trace_of(structs.replace(sampled(), logprobs=pack_array([np.nan] * 13, "f4")), peer) is None


def test_ids_cut_in_an_unusual_way_are_marked(receiver, sampled):
    """An answer that the own tokenizer would cut otherwise says so; it is traced all the same."""
    ids = [retokenize(receiver, bytes([byte]), finished=False, max_tokens=9).token_ids[0] for byte in b"yah"]
    odd = structs.replace(
        sampled(b"yah", source=receiver),
        token_ids=pack_array([*ids, receiver.eos_id], "i4"),
        logprobs=pack_array([-1.0] * 4, "f4"),
    )
    assert trace_of(odd, receiver).noncanonical


def test_believed_trace_is_aligned(peer, receiver, sampled):
    """Own tokens of the same text, with what the peer gave to the same bytes."""
    answer = sampled(logprobs=lambda ids: -np.arange(1.0, len(ids) + 1))
    carried = carry([shared(answer, trace_of(answer, peer))], [peer.fingerprint], receiver, max_tokens=64)
    assert carried.reason(0, needs_trace=True) == ""
    row = carried.batch.row(0)
    assert row.token_ids.tolist() == retokenize(receiver, TEXT, finished=True, max_tokens=64).token_ids.tolist()
    behaviour, spans = behaviour_of(row)
    told, place = [], 0
    for length in row.token_bytes.tolist():
        size = length or 1  # the end is one token on both sides
        told.append(-sum(range(place + 1, place + size + 1)))
        place += size
    assert behaviour.tolist() == told
    assert spans.tolist() == list(range(len(told)))
    assert (behaviour.dtype, spans.dtype) == (np.float32, np.int32)
    assert mean_logprobs(row).tolist() == pytest.approx([-7.0] * len(told))  # 13 peer tokens, -1 to -13


def test_equal_tokenizers_pass_bit_for_bit(receiver, sampled):
    """Ids and log-probs are those of the source, also where its tokenizer would cut the text otherwise."""
    rng = np.random.default_rng(0)
    answer = sampled(source=receiver, logprobs=lambda ids: -rng.exponential(size=len(ids)))
    carried = carry([shared(answer, trace_of(answer, receiver))], [receiver.fingerprint], receiver, max_tokens=64)
    row = carried.batch.row(0)
    behaviour, spans = behaviour_of(row)
    assert pack_array(row.token_ids, "i4") == answer.token_ids
    assert pack_array(behaviour, "f4") == answer.logprobs
    assert spans.tolist() == list(range(len(spans)))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"byte_lengths": pack_array([100] + [0] * 12, "i4")}, "lengths"),
        ({"logprobs": pack_array([np.nan] * 13, "f4")}, "logprobs"),
        ({"logprobs": pack_array([0.5] * 13, "f4")}, "logprobs"),
        ({"logprobs": b"abc"}, "type"),
        ({"special": b""}, "shape"),
    ],
)
def test_lying_trace_is_not_believed(peer, receiver, sampled, change, fault):
    """The text may still be used where none is needed; the reason is that of the lie where one is."""
    answer = sampled()
    lying = structs.replace(trace_of(answer, peer), **change)
    carried = carry([shared(answer, lying)], [peer.fingerprint], receiver, max_tokens=64)
    assert carried.trace_faults == (fault,)
    assert carried.reason(0, needs_trace=False) == ""
    assert carried.reason(0, needs_trace=True) == fault
    assert carried.batch.row(0).token_ids.size
    assert not carried.batch.is_traced.any()


def test_missing_trace_is_named(peer, receiver, sampled):
    """Without a trace the text is all there is."""
    carried = carry([shared(sampled(), None)], [peer.fingerprint], receiver, max_tokens=64)
    assert carried.trace_faults == (UNTRACED,)
    assert carried.reason(0, needs_trace=True) == UNTRACED
    assert carried.reason(0, needs_trace=False) == ""


def test_every_answer_has_a_tokenizer_of_its_own(peer, receiver, sampled):
    """A peer that came back with another tokenizer is read by the fingerprint of each record."""
    one, other = sampled(), sampled(source=receiver)
    answers = [shared(other, trace_of(other, receiver)), shared(one, trace_of(one, peer))]
    carried = carry(answers, [receiver.fingerprint, peer.fingerprint], receiver, max_tokens=64)
    assert carried.batch.reject_reason == ("", "")
    assert pack_array(carried.batch.row(0).token_ids, "i4") == other.token_ids
    assert carried.batch.row(1).token_ids.tolist() == carried.batch.row(0).token_ids.tolist() != one.token_ids
    assert carried.batch.peer_logprobs.size == len(other.token_ids) // 4 + len(one.token_ids) // 4


def test_rejected_text_wins_over_its_trace(peer, receiver, sampled):
    """What cannot be expressed is not used, whatever its trace says."""
    broken = SharedAnswer(completion=b"\xff", finish_reason=FinishReason.STOP, reward=1.0, advantage=0.0)
    carried = carry([broken], ["f"], receiver, max_tokens=64)
    assert carried.reason(0, needs_trace=False) == carried.reason(0, needs_trace=True) == "utf8"


@pytest.mark.parametrize("own_source", [False, True])
def test_ended_text_leaves_the_end_out_on_both_sides(peer, receiver, sampled, own_source):
    """Own tokens without EOS, and the peer's mean without its EOS."""
    source = receiver if own_source else peer
    text_tokens = retokenize(receiver, TEXT, finished=False, max_tokens=64).token_ids.size
    answer = sampled(source=source, logprobs=lambda ids: np.r_[np.full(len(ids) - 1, -2.0), -50.0])
    row = carry([shared(answer, trace_of(answer, source))], [source.fingerprint], receiver, max_tokens=64).batch.row(0)
    assert ended_text(row) == (text_tokens, -2.0)
    assert mean_logprobs(row)[0] < -3


def test_unfinished_text_has_no_end_to_leave_out(peer, receiver, sampled):
    """A cut answer is taken whole."""
    answer = sampled(finished=False, logprobs=lambda ids: -np.arange(len(ids), dtype=float))
    row = carry([shared(answer, trace_of(answer, peer))], [peer.fingerprint], receiver, max_tokens=64).batch.row(0)
    assert ended_text(row) == (row.token_ids.size, -5.5)


def test_shared_group_says_all(make, peer, receiver):
    """Text, reward, source advantage, end and trace of every answer, and whose it is."""
    group = make.sampled(peer, [1.0, 0.0, 0.0], "q", step=7)
    record = make.rollout(group, peer).record
    assert [answer.completion for answer in record.answers] == [answer.completion for answer in group.answers]
    assert [answer.reward for answer in record.answers] == [1, 0, 0]
    assert [answer.advantage for answer in record.answers] == pytest.approx([1.1547, -0.57735, -0.57735], rel=1e-4)
    assert all(unpack_array(answer.trace.logprobs, "f4").size for answer in record.answers)
    assert (record.source, record.prompt_id, record.newest.step, record.task) == ("peer", "q", 7, "words")
    assert record.fingerprint == peer.fingerprint
