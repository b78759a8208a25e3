"""A teacher's log-probs on the own tokens that were sampled."""

import numpy as np
import pytest
from msgspec import structs

from mrl.alignment.flags import Rejected
from mrl.records.codec import pack_array, unpack_array
from mrl.records.experience import TokenTrace
from mrl.records.finish import FinishReason
from mrl.sharing.scored import teacher_view


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
        ids = [i for piece in pieces for i in receiver.retokenize(piece, finished=False, max_tokens=9).token_ids]
        ids += [receiver.eos_id] * finished
        return structs.replace(answer, token_ids=pack_array(ids, "i4"), logprobs=pack_array([-0.5] * len(ids), "f4"))

    return sampled


def test_sampled_ids_are_never_cut_anew(receiver, sampled):
    """The answer was sampled byte by byte: it has four own tokens, though the tokenizer would write it in fewer."""
    assert receiver.retokenize(b"yah", finished=True, max_tokens=9).token_ids.size < 4
    view = teacher_view(sampled(pieces=[b"y", b"a", b"h"]), told([1, 1, 1, 0]), "f", receiver)
    assert view.logprobs.tolist() == [-1, -2, -3, -4]
    assert view.spans.tolist() == [0, 1, 2, 3]
    assert (view.logprobs.dtype, view.spans.dtype) == (np.float32, np.int32)


def test_spans_hold_the_sum_at_each_own_token(receiver, sampled):
    """ "y|a|h" against "ya|h": the first two own tokens share what the teacher gave to "ya"."""
    view = teacher_view(sampled(pieces=[b"y", b"a", b"h"]), told([2, 1, 0]), "f", receiver)
    assert view.logprobs.tolist() == [-1, -1, -2, -3]
    assert view.spans.tolist() == [0, 0, 1, 2]


def test_coarse_own_tokens_get_the_sum(receiver, sampled):
    """What the teacher cut finer is added up."""
    answer = sampled(b"reverse: yah")
    own = unpack_array(answer.token_ids, "i4")
    view = teacher_view(answer, told([1] * 12 + [0]), "f", receiver)
    assert len(view.logprobs) == len(own) < 13
    assert view.logprobs.sum() == -sum(range(1, 14))
    assert view.logprobs[-1] == -13


def test_end_without_counterpart_is_silent(receiver, sampled):
    """A teacher without an EOS says nothing of the own one: NaN, in a span of its own."""
    view = teacher_view(sampled(pieces=[b"y", b"a", b"h"]), told([2, 1]), "f", receiver)
    assert view.logprobs[:-1].tolist() == [-1, -1, -2]
    assert np.isnan(view.logprobs[-1])
    assert view.spans.tolist() == [0, 0, 1, 2]


def test_end_of_the_teacher_alone_is_left_out(receiver, sampled):
    """An own answer that ended otherwise than by its EOS gets nothing of the teacher's EOS."""
    answer = structs.replace(sampled(pieces=[b"y", b"a", b"h"], finished=False), finish_reason=FinishReason.STOP)
    view = teacher_view(answer, told([1, 1, 1, 0]), "f", receiver)
    assert view.logprobs.tolist() == [-1, -2, -3]


def test_answer_cut_inside_a_character(receiver, sampled):
    """Bytes are enough: a score that ends inside the same character is laid on as any other."""
    whole = receiver.retokenize("\u00e9".encode(), finished=False, max_tokens=9).token_ids
    assert len(whole) == 2
    cut = structs.replace(
        sampled(b"y", finished=False),
        completion=b"y\xc3",
        token_ids=pack_array([*receiver.retokenize(b"y", finished=False, max_tokens=9).token_ids, whole[0]], "i4"),
        logprobs=pack_array([-1, -1], "f4"),
    )
    assert teacher_view(cut, told([2]), "f", receiver).logprobs.tolist() == [-1, -1]
    assert teacher_view(cut, None, "f", receiver) is None


@pytest.mark.parametrize("completion", [b"hay", b"ya", b""])
def test_ids_that_are_another_text_have_no_view(receiver, sampled, completion):
    """Also where the other text is as long."""
    answer = structs.replace(sampled(b"yah"), completion=completion)
    assert teacher_view(answer, told([len(completion), 0]), "f", receiver) is None


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
    assert teacher_view(sampled(b"yah"), score, "f", receiver) == Rejected(reason)
