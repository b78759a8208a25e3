"""Answers that cross: believed, lying and missing traces, the way of equal tokenizers, and ends."""

import numpy as np
import pytest
from msgspec import structs

from mrl.records.codec import pack_array, unpack_array
from mrl.records.experience import SharedAnswer
from mrl.records.finish import FinishReason
from mrl.sharing.own_traces import trace_of
from mrl.sharing.peer_traces import behaviour_of, ended_text, in_own_tokens, mean_logprobs, peer_traces
from mrl.sharing.peer_turns import UNTRACED
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


@pytest.fixture
def read(receiver):
    """Answers in own tokens, and the faults of their traces."""
    return lambda answers, fingerprints: in_own_tokens(answers, fingerprints, receiver, max_tokens=64)


@pytest.fixture
def usable(make, make_context):
    """Why a peer's answer cannot be used: where only its text is needed, and where its trace is."""

    def usable(answer, fingerprint):
        whole = make.rollout(make.group([1.0]), make_context().receiver).record
        record = structs.replace(whole, answers=[answer], fingerprint=fingerprint)
        found = [peer_traces([record], make_context(), needs_trace=needs)[0][0] for needs in (False, True)]
        assert [trace.is_usable for trace in found] == [not trace.examined.rejected for trace in found]
        return tuple(trace.examined.rejected for trace in found)

    return usable


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


def test_believed_trace_is_aligned(peer, receiver, sampled, read):
    """Own tokens of the same text, with what the peer gave to the same bytes."""
    answer = sampled(logprobs=lambda ids: -np.arange(1.0, len(ids) + 1))
    batch, faults = read([shared(answer, trace_of(answer, peer))], [peer.fingerprint])
    assert faults == [""]
    row = batch.row(0)
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


def test_equal_tokenizers_pass_bit_for_bit(receiver, sampled, read):
    """Ids and log-probs are those of the source, also where its tokenizer would cut the text otherwise."""
    rng = np.random.default_rng(0)
    answer = sampled(source=receiver, logprobs=lambda ids: -rng.exponential(size=len(ids)))
    row = read([shared(answer, trace_of(answer, receiver))], [receiver.fingerprint])[0].row(0)
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
def test_lying_trace_is_not_believed(peer, sampled, read, usable, change, fault):
    """The text may still be used where none is needed; the reason is that of the lie where one is."""
    answer = sampled()
    lying = structs.replace(trace_of(answer, peer), **change)
    batch, faults = read([shared(answer, lying)], [peer.fingerprint])
    assert faults == [fault]
    assert usable(shared(answer, lying), peer.fingerprint) == ("", fault)
    assert batch.row(0).token_ids.size
    assert not batch.is_traced.any()


def test_missing_trace_is_named(peer, sampled, usable):
    """Without a trace the text is all there is."""
    assert usable(shared(sampled(), None), peer.fingerprint) == ("", UNTRACED)


def test_every_answer_has_a_tokenizer_of_its_own(peer, receiver, sampled, read):
    """A peer that came back with another tokenizer is read by the fingerprint of each record."""
    one, other = sampled(), sampled(source=receiver)
    answers = [shared(other, trace_of(other, receiver)), shared(one, trace_of(one, peer))]
    batch, _ = read(answers, [receiver.fingerprint, peer.fingerprint])
    assert batch.reject_reason == ("", "")
    assert pack_array(batch.row(0).token_ids, "i4") == other.token_ids
    assert batch.row(1).token_ids.tolist() == batch.row(0).token_ids.tolist() != one.token_ids
    assert batch.peer_logprobs.size == len(other.token_ids) // 4 + len(one.token_ids) // 4


def test_rejected_text_wins_over_its_trace(usable):
    """What cannot be expressed is not used, whatever its trace says."""
    broken = SharedAnswer(completion=b"\xff", finish_reason=FinishReason.STOP, reward=1.0, advantage=0.0)
    assert usable(broken, "f") == ("utf8", "utf8")


@pytest.mark.parametrize("own_source", [False, True])
@pytest.mark.parametrize("room", [-3, -1, 0])
def test_a_text_that_the_own_limit_cuts_is_not_imitated(make, make_context, peer, receiver, own_source, room):
    """Its beginning was verified by nobody, and one that only lacks its EOS was never ended; ratios may use either."""
    source = receiver if own_source else peer
    size = retokenize(receiver, TEXT, finished=True, max_tokens=64).token_ids.size
    told = make.rollout(make.sampled(source, [1.0], texts=[TEXT]), source).record
    rejected = []
    for needs_trace in (False, True):
        context = make_context(max_answer_tokens=size + room)
        ((trace,),) = peer_traces([told], context, needs_trace=needs_trace)
        assert trace.num_tokens <= size + room
        rejected.append(trace.examined.rejected)
        counted = context.recorder.record([], {}).get("align/rejected/cut/peer", 0)
        assert counted == (rejected[-1] == "cut"), "it is not named in the metrics"
    assert rejected == (["cut", ""] if room else ["", ""])


@pytest.mark.parametrize("own_source", [False, True])
def test_ended_text_leaves_the_end_out_on_both_sides(peer, receiver, sampled, read, own_source):
    """Own tokens without EOS, and the peer's mean without its EOS."""
    source = receiver if own_source else peer
    text_tokens = retokenize(receiver, TEXT, finished=False, max_tokens=64).token_ids.size
    answer = sampled(source=source, logprobs=lambda ids: np.r_[np.full(len(ids) - 1, -2.0), -50.0])
    row = read([shared(answer, trace_of(answer, source))], [source.fingerprint])[0].row(0)
    kept, mean = ended_text(row)
    assert (kept.tolist(), mean) == ([True] * text_tokens + [False], -2.0)
    assert mean_logprobs(row)[0] < -3


def test_unfinished_text_has_no_end_to_leave_out(peer, sampled, read):
    """A cut answer is taken whole."""
    answer = sampled(finished=False, logprobs=lambda ids: -np.arange(len(ids), dtype=float))
    row = read([shared(answer, trace_of(answer, peer))], [peer.fingerprint])[0].row(0)
    kept, mean = ended_text(row)
    assert (kept.tolist(), mean) == ([True] * row.token_ids.size, -5.5)


def test_traces_stand_by_record_and_are_examined(make, make_context, peer, receiver):
    """Answers keep their order; the recorder hears of every one, and a row says which answer it is of."""
    context = make_context(max_answer_tokens=3)
    whole = make.rollout(make.sampled(peer, [1, 0], "q"), peer, source="b").record
    success = make.success(prompt_id="p", source="a").record
    first, second = peer_traces([whole, success], context, needs_trace=False)
    told = [(one.source, one.examined.prompt_id, one.answer) for one in [*first, *second]]
    assert told == [("b", "q", whole.answers[0]), ("b", "q", whole.answers[1]), ("a", "p", success)]
    assert [one.advantage for one in [*first, *second]] == [whole.answers[0].advantage, whole.answers[1].advantage, 0]
    assert {one.num_tokens for one in [*first, *second]} <= {0, 1, 2, 3}
    values = context.recorder.record([], {})
    assert (values["align/rows/b"], values["align/rows/a"]) == (2, 1)
    assert peer_traces([], context, needs_trace=True) == []


def test_example_of_a_trace(make, make_context, peer):
    """The own prompt, the own tokens, one advantage; cut where asked, and the mean over tokens without weights."""
    ((trace, _),) = peer_traces(
        [make.rollout(make.sampled(peer, [1, 0]), peer, source="a").record], make_context(), needs_trace=True
    )
    prompt, size = np.array([1, 2, 3], np.int32), trace.num_tokens
    behaviour, spans = behaviour_of(trace.aligned)
    cut = trace.example(
        prompt, component="c", advantage=2.0, behaviour=behaviour, spans=spans, phase=3, kept=np.arange(size) < size - 1
    )
    assert cut.answer_token_ids.tolist() == trace.aligned.token_ids[:-1].tolist()
    assert cut.prompt_token_ids.tolist() == [1, 2, 3]
    assert cut.advantages.tolist() == [2.0] * (size - 1)
    assert cut.weights.tolist() == pytest.approx([1 / (size - 1)] * (size - 1))
    assert len(cut.behaviour_logprobs) == len(cut.behaviour_spans) == size - 1
    assert (cut.component, cut.source, cut.prompt_id, cut.phase) == ("c", "a", "p", 3)
    whole = trace.example(prompt, component="c", weights=np.ones(size, np.float32))
    assert (whole.answer_token_ids.size, whole.weights.sum(), whole.behaviour_logprobs) == (size, size, None)
    assert not whole.advantages.any()


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
