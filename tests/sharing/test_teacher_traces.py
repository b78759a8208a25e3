"""A teacher's log-probs on the own tokens that were sampled."""

from dataclasses import fields

import numpy as np
import pytest
from msgspec import structs

from mrl.alignment.flags import Flag, Rejected
from mrl.records.codec import pack_array, unpack_array
from mrl.records.experience import SharedAnswer, TokenTrace
from mrl.records.finish import FinishReason
from mrl.sharing.peer_traces import in_own_tokens
from mrl.sharing.teacher_traces import teacher_trace
from tests.support.retokenizing import retokenize


def told(lengths, logprobs=None, special=None) -> TokenTrace:
    """A score by byte lengths; -1, -2, -3, ... nats; what has no bytes is special."""
    logprobs = -np.arange(1.0, len(lengths) + 1) if logprobs is None else logprobs
    special = [not length for length in lengths] if special is None else special
    return TokenTrace(
        byte_lengths=pack_array(lengths, "i4"), logprobs=pack_array(logprobs, "f4"), special=pack_array(special, "u1")
    )


@pytest.fixture
def sampled(make, receiver):
    """One own answer, or one of the given pieces as they were sampled."""

    def sampled(text=b"yah", *, pieces=None, finished=True):
        answer = make.sampled(receiver, [1.0], texts=[text], finished=finished).answers[0]
        if pieces is None:
            return answer
        ids = [i for piece in pieces for i in retokenize(receiver, piece, finished=False, max_tokens=9).token_ids]
        ids += [receiver.eos_id] * finished
        return structs.replace(answer, token_ids=pack_array(ids, "i4"), logprobs=pack_array([-0.5] * len(ids), "f4"))

    return sampled


def test_sampled_ids_are_never_cut_anew(receiver, sampled):
    """The answer was sampled byte by byte: it has four own tokens, though the tokenizer would write it in fewer."""
    assert retokenize(receiver, b"yah", finished=True, max_tokens=9).token_ids.size < 4
    view = teacher_trace(sampled(pieces=[b"y", b"a", b"h"]), [told([1, 1, 1, 0])], "f", receiver)
    assert view.logprobs.tolist() == [-1, -2, -3, -4]
    assert view.spans.tolist() == [0, 1, 2, 3]
    assert (view.logprobs.dtype, view.spans.dtype) == (np.float32, np.int32)


def test_spans_hold_the_sum_at_each_own_token(receiver, sampled):
    """ "y|a|h" against "ya|h": the first two own tokens share what the teacher gave to "ya"."""
    view = teacher_trace(sampled(pieces=[b"y", b"a", b"h"]), [told([2, 1, 0])], "f", receiver)
    assert view.logprobs.tolist() == [-1, -1, -2, -3]
    assert view.spans.tolist() == [0, 0, 1, 2]


def test_a_view_books_every_log_prob_of_the_teacher(receiver, sampled):
    """As the path of texts books one: where that gives the ids that were sampled, the two are equal field by field."""
    text = b"reverse: yah"
    answer = sampled(text)
    score = told([3, 4, 2, 3, 0])
    view = teacher_trace(answer, [score], "f", receiver).aligned
    shared = SharedAnswer(completion=text, finish_reason=FinishReason.STOP, reward=0.0, advantage=0.0, trace=score)
    wanted, _ = in_own_tokens([shared], ["f"], receiver, max_tokens=99)
    assert (view.span_peer_tokens.tolist(), view.span_receiver_tokens.tolist()) == ([2, 2, 1], [1, 2, 1])
    for field in fields(view):
        np.testing.assert_array_equal(getattr(view, field.name), getattr(wanted, field.name), err_msg=field.name)


@pytest.mark.parametrize(
    ("finished", "lengths", "own_tokens", "dropped", "flags"),
    [
        (True, [2, 1, 0], 4, 0.0, Flag(0)),
        (True, [2, 1], 3, 0.0, Flag.EOS_UNMAPPED),
        (False, [2, 1, 0], 3, -3.0, Flag.EOS_UNMAPPED),
        (False, [2, 1], 3, 0.0, Flag(0)),
    ],
)
def test_an_end_that_one_side_lacks_is_in_no_span(receiver, sampled, finished, lengths, own_tokens, dropped, flags):
    """The own token is left out, the teacher's is dropped with its log-prob."""
    answer = structs.replace(sampled(pieces=[b"y", b"a", b"h"], finished=finished), finish_reason=FinishReason.STOP)
    row = teacher_trace(answer, [told(lengths)], "f", receiver).aligned.row(0)
    assert (len(row.token_ids), row.flags, row.span_logprob[:2].tolist()) == (own_tokens, flags, [-1, -2])
    assert (row.dropped_logprob, row.dropped_tokens) == (dropped, int(dropped < 0))
    assert (row.peer_span_of_token < 0).sum() == row.dropped_tokens
    assert row.peer_logprob == row.span_logprob.sum() + row.dropped_logprob == -sum(range(1, len(lengths) + 1))


def test_coarse_own_tokens_get_the_sum(receiver, sampled):
    """What the teacher cut finer is added up."""
    answer = sampled(b"reverse: yah")
    own = unpack_array(answer.token_ids, "i4")
    view = teacher_trace(answer, [told([1] * 12 + [0])], "f", receiver)
    assert len(view.logprobs) == len(own) < 13
    assert view.logprobs.sum() == -sum(range(1, 14))
    assert view.logprobs[-1] == -13


def test_end_without_counterpart_is_silent(receiver, sampled):
    """A teacher without an EOS says nothing of the own one: NaN, in a span of its own."""
    view = teacher_trace(sampled(pieces=[b"y", b"a", b"h"]), [told([2, 1])], "f", receiver)
    assert view.logprobs[:-1].tolist() == [-1, -1, -2]
    assert np.isnan(view.logprobs[-1])
    assert view.spans.tolist() == [0, 0, 1, 2]


def test_end_of_the_teacher_alone_is_left_out(receiver, sampled):
    """An own answer that ended otherwise than by its EOS gets nothing of the teacher's EOS."""
    answer = structs.replace(sampled(pieces=[b"y", b"a", b"h"], finished=False), finish_reason=FinishReason.STOP)
    view = teacher_trace(answer, [told([1, 1, 1, 0])], "f", receiver)
    assert view.logprobs.tolist() == [-1, -2, -3]


def test_answer_cut_inside_a_character(receiver, sampled):
    """Bytes are enough: a score that ends inside the same character is laid on as any other."""
    whole = retokenize(receiver, "\u00e9".encode(), finished=False, max_tokens=9).token_ids
    assert len(whole) == 2
    cut = structs.replace(
        sampled(b"y", finished=False),
        completion=b"y\xc3",
        token_ids=pack_array([*retokenize(receiver, b"y", finished=False, max_tokens=9).token_ids, whole[0]], "i4"),
        logprobs=pack_array([-1, -1], "f4"),
    )
    view = teacher_trace(cut, [told([2])], "f", receiver)
    assert view.logprobs.tolist() == [-1, -1]
    assert view.aligned.flags.tolist() == [Flag.TAIL]
    assert teacher_trace(cut, [None], "f", receiver) is None


@pytest.mark.parametrize("completion", [b"hay", b"ya", b""])
def test_ids_that_are_another_text_have_no_view(receiver, sampled, completion):
    """Also where the other text is as long."""
    answer = structs.replace(sampled(b"yah"), completion=completion)
    assert teacher_trace(answer, [told([len(completion), 0])], "f", receiver) is None


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (told([5, 0]), "lengths"),
        (told([3, 0], logprobs=[1.0, -1.0]), "logprobs"),
        (told([3, 0], special=[1, 1]), "lengths"),
        (told([3, 0], special=[0]), "shape"),
        (told([]), "lengths"),
    ],
)
def test_lying_scores_are_rejected(receiver, sampled, score, reason):
    """As a value, with its reason."""
    assert teacher_trace(sampled(b"yah"), [score], "f", receiver) == Rejected(reason)
