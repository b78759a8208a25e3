"""Likeliest units cross tokenizers as bytes, and stand where one own token has the same bytes."""

import itertools
import json
import math

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from mrl.alignment.flags import Rejected
from mrl.alignment.next_units import decode_units, encode_units
from mrl.alignment.receiver import load_receiver
from mrl.records.codec import decode, decoder, encode, pack_array
from mrl.records.experience import LikeliestUnits
from tests.alignment.conftest import KINDS

PAIRS = list(itertools.product(KINDS, repeat=2))


def told(teller, ids, logprobs=None):
    """What `teller` says of these ids, [T, K], as it comes over the wire."""
    ids = np.array(ids, np.int32)
    nats = np.log(np.full(ids.shape, 0.1)) if logprobs is None else np.array(logprobs)
    return decode(encode(encode_units(ids, nats.astype(np.float32), teller)), decoder(LikeliestUnits))


def said(units, reader, place):
    """Bytes -> probability of the units of a place."""
    ids, nats = units.token_ids[place], units.logprobs[place]
    return {
        reader.unit_of(int(token_id), opens=place == 0): round(math.exp(nat), 4)
        for token_id, nat in zip(ids, nats, strict=True)
        if np.isfinite(nat)
    }


@pytest.mark.parametrize(("teller", "reader"), PAIRS, ids="-".join)
def test_a_unit_stands_where_one_own_token_has_its_bytes(receiver_of, teller, reader):
    """All ids of the teller, at the beginning of a text and behind it; what stands is told as it was meant."""
    teller, reader = receiver_of(teller), receiver_of(reader)
    ids = list(range(len(teller.table.pieces)))
    own = {reader.unit_of(one, opens=False) for one in range(len(reader.table.pieces))} - {None}
    ids_TK = [[one, one] for one in ids]
    found = decode_units(
        told(teller, [[0, 0], *ids_TK], [[-1.0, -np.inf]] * (len(ids) + 1)), len(ids) + 1, reader, end_id=reader.eos_id
    )

    for place, one in enumerate(ids, 1):
        unit = teller.unit_of(one, opens=False)
        assert said(found, reader, place) == ({unit: round(math.exp(-1), 4)} if unit in own else {})
    if teller is reader:
        kept = [one for one in ids if one in found.token_ids[one + 1] and np.isfinite(found.logprobs[one + 1]).any()]
        assert len(kept) > 0.7 * len(ids), "own tokens come back as themselves, but for bytes that words cover"


def test_a_phantom_space_is_none_at_the_beginning_of_a_text(receiver_of):
    """Who writes it means the word without; behind the first token the space is one."""
    plain, phantom = receiver_of("byte_level"), receiver_of("metaspace_prepend")
    word = next(
        piece for piece in phantom.table.pieces if piece.startswith(b" ") and len(piece) > 2 and piece in
        plain.table.pieces and piece[1:] in plain.table.pieces
    )  # fmt: skip
    of_phantom = phantom.table.pieces.index(word)
    found = decode_units(told(phantom, [[of_phantom], [of_phantom]]), 2, plain)
    assert [said(found, plain, place) for place in (0, 1)] == [{word[1:]: 0.1}, {word: 0.1}]
    back = told(plain, found.token_ids.tolist())
    assert decode_units(back, 2, phantom).token_ids.tolist() == [[of_phantom], [of_phantom]]


@pytest.mark.parametrize("kind", ["metaspace_prepend", "metaspace_first", "metaspace_always"])
def test_a_space_at_the_beginning_is_not_the_phantom_one(receiver_of, kind):
    """A word with a space before it is two tokens there, which no unit is; the word alone is one."""
    phantom = receiver_of(kind)
    word = next(piece for piece in phantom.table.pieces if piece.startswith(b" ") and len(piece) > 2)
    assert phantom.completion_bytes([phantom.id_of(word[1:], opens=True)]) == word[1:]
    assert phantom.id_of(word, opens=True) is None
    assert phantom.id_of(word, opens=False) == phantom.table.pieces.index(word)


def test_a_unit_is_the_token_that_the_tokenizer_itself_writes(save_folder, make_metaspace):
    """Not the byte that it falls back on: that of a line break stands behind the line breaks of Gemma's vocabulary."""
    content = json.loads(make_metaspace().to_str())
    vocab = content["model"]["vocab"]
    vocab["\n"], vocab["<0x0A>"] = vocab["<0x0A>"], vocab["\n"]
    for tokenizer in (make_metaspace(), Tokenizer.from_str(json.dumps(content))):
        one = load_receiver(save_folder(tokenizer))
        assert one.cut_texts(["a\n"], [b"a\n"]).token_ids.tolist()[-1:] == [one.id_of(b"\n", opens=False)]
        assert one.id_of(b"\x80", opens=False) == tokenizer.token_to_id("<0x80>")


def test_ends_are_one_unit_and_other_specials_none(receiver_of, tokenizers_by_kind):
    """An end means the same on both sides, whatever it is called; two ends of the teller are one."""
    teller, reader = receiver_of("metaspace"), receiver_of("byte_level")
    end, unknown = (tokenizers_by_kind["metaspace"].token_to_id(name) for name in ("</s>", "<unk>"))
    found = decode_units(told(teller, [[end, unknown]] * 2), 2, reader, end_id=reader.eos_id)
    assert [said(found, reader, place) for place in (0, 1)] == [{b"": 0.1}] * 2
    assert reader.eos_id in found.token_ids[1]
    twice = LikeliestUnits(
        units=[b"", b""], places=pack_array([[0, 1]], "i4"), logprobs=pack_array(np.log([[0.25, 0.5]]), "f4")
    )
    assert said(decode_units(twice, 1, reader, end_id=reader.eos_id), reader, 0) == {b"": 0.75}


def test_an_end_is_left_to_the_rest_where_no_own_one_stands_for_it(receiver_of):
    """A reader may have no EOS, or several."""
    one = receiver_of("byte_level")
    assert not np.isfinite(decode_units(told(one, [[one.eos_id]]), 1, one).logprobs).any()


def test_missing_units_are_none(receiver_of):
    """A server may tell fewer: ids below 0, and numbers that are none."""
    one = receiver_of("byte_level")
    token = next(n for n, piece in enumerate(one.table.pieces) if len(piece) > 1)
    found = decode_units(told(one, [[token, -1], [token, token]], [[-1.0, -np.inf], [np.nan, -np.inf]]), 2, one)
    assert np.isfinite(found.logprobs).sum(-1).tolist() == [1, 0]


def test_each_unit_crosses_once(receiver_of):
    """However many places it is likely in."""
    one = receiver_of("byte_level")
    tokens = [n for n, piece in enumerate(one.table.pieces) if len(piece) > 1][:3]
    sent = told(one, [tokens] * 500)
    assert len(sent.units) == 3
    assert len(encode(sent)) < 500 * 3 * 8 + 100


GOOD = {"units": [b"a", b"b"], "places": [[0, 1], [1, -1]], "logprobs": [[-1.0, -2.0], [-0.5, 0.0]]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"places": [[0, 2], [1, -1]]}, "shape"),
        ({"places": [[0, 1]]}, "shape"),
        ({"places": [[-1] * 20] * 2, "logprobs": [[-9.0] * 20] * 2}, None),
        ({"places": [[-1] * 21] * 2, "logprobs": [[-9.0] * 21] * 2}, "size"),
        ({"places": [[0], [1], [1]], "logprobs": [[-1.0]] * 3}, "shape"),
        ({"logprobs": [[-1.0, np.nan], [-0.5, 0.0]]}, "logprobs"),
        ({"logprobs": [[-1.0, 0.5], [-0.5, 0.0]]}, "logprobs"),
        ({"logprobs": [[-0.5, -0.6], [-0.5, 0.0]]}, "logprobs"),
        ({"logprobs": [[-1.0, -np.inf], [-0.5, 0.0]]}, None),
        ({"units": []}, "shape"),
    ],
)
def test_numbers_that_cannot_be_are_refused(receiver_of, changes, reason):
    """Places beyond the units, arrays of other sizes, probabilities that sum to more than 1."""
    fields = GOOD | changes
    sent = LikeliestUnits(
        units=fields["units"], places=pack_array(fields["places"], "i4"), logprobs=pack_array(fields["logprobs"], "f4")
    )
    found = decode_units(sent, 2, receiver_of("byte_level"))
    assert (found.reason if isinstance(found, Rejected) else None) == reason


@pytest.mark.parametrize(("places", "logprobs"), [(b"abc", b"abc"), (b"abcd", b"abcdabcd"), (b"", b"abcd")])
def test_bytes_of_no_array_are_refused(receiver_of, places, logprobs):
    """Lengths that are no multiple, or differ."""
    found = decode_units(LikeliestUnits(units=[b"a"], places=places, logprobs=logprobs), 1, receiver_of("byte_level"))
    assert found == Rejected("shape")


def test_a_text_of_no_tokens_has_no_units(receiver_of):
    """Neither way."""
    one = receiver_of("byte_level")
    sent = encode_units(np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32), one)
    assert decode_units(sent, 0, one) == Rejected("shape")
    assert msgspec.structs.asdict(sent) == {"units": [], "places": b"", "logprobs": b""}
