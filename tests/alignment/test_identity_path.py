"""Answers of the own tokenizer: ids pass untouched, and nothing that the answer says beside them is believed."""

import dataclasses

import numpy as np
import pytest

from mrl.alignment.flags import Flag
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.receiver import Receiver
from mrl.alignment.sampled_answers import describe_answers
from mrl.alignment.tokenizer_file import read_tokenizer_file
from mrl.alignment.translate import translate_batch
from mrl.records.finish import FinishReason

TEXT = "reverse: yah"
KINDS = ("byte_level", "metaspace_prepend")


@pytest.fixture(params=KINDS)
def receiver(request, receiver_of) -> Receiver:
    return receiver_of(request.param)


def sampled(source: Receiver, ids: list[int], *, finished: bool) -> PeerAnswer:
    """An answer with these ids, as its source tells it."""
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
    return describe_answers(
        source, [np.array(ids, dtype=np.int32)], [logprobs], [FinishReason.STOP if finished else FinishReason.LENGTH]
    )[0]


def ids_of(receiver: Receiver) -> list[int]:
    return receiver.cut_texts([TEXT], [TEXT.encode()]).token_ids.tolist()


def outcome(receiver: Receiver, answer: PeerAnswer) -> tuple[str, Flag, list[int]]:
    """Reason, flags (but what the source tells of itself) and ids of an answer between two honest ones."""
    honest = sampled(receiver, [*ids_of(receiver), receiver.eos_id], finished=True)
    batch = translate_batch([honest, answer, honest], receiver, max_tokens=99)
    assert batch.reject_reason[::2] == ("", "")
    assert batch.flags[::2].tolist() == [0, 0]
    trace = batch.row(1)
    return trace.reject_reason, trace.flags & ~Flag.NONCANON, trace.token_ids.tolist()


def test_a_declared_eos_beyond_the_vocabulary_passes(folders):
    """The receiver's own EOS is known to it, also where no piece of the file stands for it."""
    file = read_tokenizer_file(folders["byte_level"])
    plain = Receiver(file, eos_ids=())
    padded = Receiver(file, eos_ids=(len(plain.table.pieces) + 5,))
    ids = [*ids_of(padded), padded.eos_id]
    assert outcome(padded, sampled(padded, ids, finished=True)) == ("", Flag(0), ids)
    hole = [*ids_of(padded), padded.eos_id - 1]
    assert outcome(padded, sampled(padded, hole, finished=False))[0] == "ids_differ"


def test_a_special_mark_on_a_token_that_is_none_refuses_the_row(receiver):
    """Ids decide what is special."""
    special = min(receiver.table.special_ids - {receiver.eos_id}, default=receiver.eos_id)
    answer = sampled(receiver, [special, *ids_of(receiver), receiver.eos_id], finished=True)
    assert outcome(receiver, answer)[0] == ""
    silent = dataclasses.replace(
        answer, token_ids=np.where(answer.special, ids_of(receiver)[0], answer.token_ids).astype(np.int32)
    )
    assert outcome(receiver, silent)[0] == "ids_differ"


def test_an_end_that_is_no_own_eos_is_flagged(folders):
    """A finished row must end with an EOS of this receiver. The ids stay as they were sampled."""
    file = read_tokenizer_file(folders["metaspace"])
    vocab = file.content["model"]["vocab"]
    receiver = Receiver(file, eos_ids=(vocab["</s>"],))
    ids = ids_of(receiver)
    foreign = [*ids, vocab["<unk>"]]
    assert outcome(receiver, sampled(receiver, ids, finished=True)) == ("", Flag.EOS_UNMAPPED, ids)
    flags = Flag.EOS_UNMAPPED | Flag.SPECIAL_IN
    assert outcome(receiver, sampled(receiver, foreign, finished=True)) == ("", flags, foreign)
    several = Receiver(file, eos_ids=(vocab["</s>"], vocab["<unk>"]))
    assert outcome(several, sampled(several, foreign, finished=True)) == ("", Flag(0), foreign)
    endless = Receiver(file, eos_ids=())
    (row,) = translate_batch([sampled(endless, foreign, finished=True)], endless, max_tokens=99).flags.tolist()
    assert row == flags
