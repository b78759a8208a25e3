"""Answers of the receiver's own tokenizer: ids pass untouched once they are found to stand for the text."""

from random import Random

import numpy as np

from mrl.alignment.flags import Flag
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.receiver import Receiver
from mrl.alignment.translate import AlignedTrace, translate_batch
from tests.support.alignment_properties.generated import (
    as_stranger,
    canonical_ids,
    described,
    fields_of,
    make_answer,
    make_logprobs,
    sampled_answer,
    text_for,
)
from tests.support.alignment_properties.kinds import KINDS, METASPACE, SILENT, Receivers, usual
from tests.support.alignment_properties.raising import never_raises

NO_LIMIT = 10_000


def expect_untouched(receiver: Receiver, answer: PeerAnswer, trace: AlignedTrace) -> None:
    """Check that an answer passed bit for bit, with one span per token."""
    assert trace.reject_reason == ""
    assert trace.token_ids.tobytes() == answer.token_ids.tobytes()
    assert trace.span_logprob.astype(np.float32).tobytes() == answer.logprobs.tobytes()
    assert trace.span_of_token.tolist() == trace.peer_span_of_token.tolist() == [*range(len(trace.token_ids))]
    assert trace.dropped_tokens == 0
    ends_well = answer.token_ids[-1] in receiver.eos_ids
    assert bool(trace.flags & Flag.TAIL) == (not answer.finished)
    assert bool(trace.flags & Flag.SPECIAL_IN) == (int(answer.special.sum()) > ends_well)
    assert bool(trace.flags & Flag.EOS_UNMAPPED) == (answer.finished and not ends_well)
    assert bool(trace.flags & Flag.NONCANON) == answer.noncanonical
    assert not trace.flags & (Flag.REJECT | Flag.RECV_TRUNC | Flag.NORM | Flag.SPECIAL_OUT | Flag.UNTRACED)


def check_the_own_tokenizer_passes_untouched(receivers: Receivers, random: Random) -> None:
    """With equal fingerprints ids and log-probs come out bit for bit, specials and odd ids included."""
    for kind, receiver in usual(receivers).items():
        texts = [text_for(random, receiver, metaspace=kind in METASPACE) for _ in range(8)]
        mine = [sampled_answer(random, receiver, text) for text in texts]
        answers = [answer for one in mine for answer in (one, make_answer(random))]
        batch = translate_batch(answers, receiver, max_tokens=NO_LIMIT)
        for place, answer in enumerate(mine):
            expect_untouched(receiver, answer, batch.row(2 * place))


def truth(random: Random, receiver: Receiver, text: str = "Qx: yah = zz") -> PeerAnswer:
    """Make an honest finished answer of this tokenizer."""
    ids = [*canonical_ids(receiver, text), receiver.eos_id]
    return described(receiver, ids, make_logprobs(random, len(ids)), finished=True)


def expect_refused(receiver: Receiver, honest: PeerAnswer, **lie) -> None:
    """Check that a lie is refused with "ids_differ", and the honest answers beside it are not."""
    liar = PeerAnswer(**(fields_of(honest) | lie))
    with never_raises(lie):
        batch = translate_batch([honest, liar, honest], receiver, max_tokens=99)
    assert batch.reject_reason == ("", "ids_differ", ""), lie
    assert batch.row(1).token_ids.size == 0
    assert batch.row(2).token_ids.tolist() == honest.token_ids.tolist()
    assert batch.row(1).dropped_tokens == len(honest.special)


def check_lying_ids_are_rejected(receivers: Receivers, random: Random) -> None:
    """Ids that stand for another text, or are no ids, are refused."""
    for kind in KINDS:
        honest = truth(random, receivers[kind])
        for change in (lambda ids: ids[::-1].copy(), lambda ids: ids * 0 - 1, lambda ids: ids * 0 + 10**9):
            expect_refused(receivers[kind], honest, token_ids=change(honest.token_ids))


def check_false_descriptions_are_rejected(receivers: Receivers, random: Random) -> None:
    """True ids beside another text, or beside other byte lengths, are refused."""
    for kind in KINDS:
        honest = truth(random, receivers[kind])
        first, second = np.flatnonzero(honest.byte_lengths)[:2]
        lengths = honest.byte_lengths.copy()
        lengths[first] += 1
        lengths[second] -= 1
        expect_refused(receivers[kind], honest, completion=b"Qx: yoh = zz")
        expect_refused(receivers[kind], honest, byte_lengths=lengths)


def check_unknown_ids_are_rejected(receivers: Receivers, random: Random) -> None:
    """An id that is no token of the table, as of rows that pad an embedding, cannot be trained on and is refused."""
    for kind in KINDS:
        receiver, honest = receivers[kind], truth(random, receivers[kind])
        beyond = len(receiver.table.pieces) + random.randrange(1000)
        used = {*np.flatnonzero([len(piece) for piece in receiver.table.pieces]), *receiver.table.special_ids}
        holes = sorted(set(range(len(receiver.table.pieces))) - used)
        for unknown in (beyond, *random.sample(holes, min(1, len(holes)))):
            silent = np.flatnonzero(honest.byte_lengths == 0)[-1]
            ids, special = honest.token_ids.copy(), honest.special.copy()
            ids[silent], special[silent] = unknown, bool(random.getrandbits(1))
            expect_refused(receiver, honest, token_ids=ids, special=special)


def check_lying_marks_are_rejected(receivers: Receivers, random: Random) -> None:
    """The table decides which ids are special: a mark too few or too many is refused."""
    for kind in KINDS:
        receiver = receivers[kind]
        ids = [min(receiver.table.special_ids), *canonical_ids(receiver, "Qx: yah"), receiver.eos_id]
        honest = described(receiver, ids, make_logprobs(random, len(ids)), finished=True)
        assert honest.special.sum() == 2
        for place in np.flatnonzero(honest.special):
            special = honest.special.copy()
            special[place] = False
            expect_refused(receiver, honest, special=special)


def check_ends_of_own_answers_are_read_from_the_ids(receivers: Receivers, random: Random) -> None:
    """A finished answer whose last id is no EOS of the receiver is flagged, whatever its marks; its ids stay."""
    for kind in KINDS:
        receiver = receivers[kind]
        words = canonical_ids(receiver, "yah")
        others = sorted(receiver.table.special_ids - set(receiver.eos_ids))
        for end in ([], [receiver.eos_id], *([other] for other in others[:1])):
            ids = [*words, *end]
            answer = described(receiver, ids, make_logprobs(random, len(ids)), finished=True)
            trace = translate_batch([answer], receiver, max_tokens=NO_LIMIT).row(0)
            expect_untouched(receiver, answer, trace)
            assert bool(trace.flags & Flag.EOS_UNMAPPED) == (end != [receiver.eos_id])
            assert bool(trace.flags & Flag.SPECIAL_IN) == (end not in ([], [receiver.eos_id]))


def check_plain_text_gives_no_special_id(receivers: Receivers, random: Random) -> None:
    """Literals of special tokens stay text, and an id that must stay silent is refused."""
    for kind in ("metaspace", "metaspace_prepend"):
        assert receivers[kind].table.join([0, 1]) == b"", "<unk> and </s> have no bytes"
    for receiver in usual(receivers).values():
        for literal in ("</s>", "<|im_end|>", "<unk>", "a</s>b", "<|im_end|> ", "<|endoftext|>"):
            cut = receiver.cut_texts([literal], [literal.encode()])
            assert cut.faults == {}
            assert not receiver.table.special_ids & set(cut.token_ids.tolist())
            assert receiver.completion_bytes(cut.token_ids) == literal.encode()
    sampled = [as_stranger(truth(random, receivers["byte_level"], text)) for text in ("yah y", "=")]
    batch = translate_batch(sampled, receivers[SILENT], max_tokens=99)
    assert batch.reject_reason == ("special_out", "")
    assert batch.row(0).flags & Flag.SPECIAL_OUT
    assert batch.row(0).flags & Flag.REJECT
