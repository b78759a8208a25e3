import numpy as np
import pytest
from tokenizers import pre_tokenizers

from mrl.alignment.byte_table import ByteTable, build_byte_table, piece_bytes
from mrl.alignment.tokenizer_file import read_tokenizer_file


def test_character_map_is_that_of_the_library():
    """Every byte comes back from the characters that byte-level pre-tokenization writes for it."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(chr(code) for code in range(1, 0x800))
    (piece, _), *rest = splitter.pre_tokenize_str(text)
    assert not rest
    assert piece_bytes(piece, "byte_level") == text.encode()
    assert len({piece_bytes(c, "byte_level") for c in pre_tokenizers.ByteLevel.alphabet()}) == 256


@pytest.mark.parametrize(
    ("piece", "kind", "expected"),
    [
        ("\u2581yah", "metaspace", b" yah"),
        ("<0x0A>", "metaspace", b"\n"),
        ("<0xff>", "metaspace", b"\xff"),
        ("<0x0A>x", "metaspace", b"<0x0A>x"),
        ("\u0120yah", "byte_level", b" yah"),
        ("<0x0A>", "byte_level", b"<0x0A>"),
        ("\u6f22", "byte_level", None),
    ],
)
def test_piece_bytes(piece, kind, expected):
    """Pieces stand for the bytes that the kind's decoder would give them; a piece outside the map stands for none."""
    assert piece_bytes(piece, kind) == expected


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "metaspace_prepend"])
def test_special_tokens_are_zero_width(folders, tokenizers_by_kind, kind):
    """Special added tokens have no bytes, non-special ones have their text."""
    file = read_tokenizer_file(folders[kind])
    table = build_byte_table(file)
    specials = {token["id"] for token in file.added_tokens if token["special"]}
    assert specials
    assert table.special_ids == specials
    assert table.join(sorted(specials)) == b""
    plain = [token for token in file.added_tokens if not token["special"]]
    assert [table.pieces[token["id"]] for token in plain] == [token["content"].encode() for token in plain]
    assert len(table.pieces) == tokenizers_by_kind[kind].get_vocab_size()


def test_known_ids_have_bytes_or_are_special():
    """Holes, ids that only pad the embedding and negative ids stand for nothing; an EOS beyond the table is known."""
    table = ByteTable([b"a", b"", b"bc", b""], frozenset({3}))
    assert (
        table.is_known(np.array([0, 1, 2, 3, 4, 10**9, -1, -(2**31)])).tolist()
        == [True, False, True, True] + [False] * 4
    )
    assert table.is_known(np.zeros(0, np.int32)).tolist() == []


def test_eos_beyond_the_vocabulary_is_known(folders):
    """A declared EOS that no piece stands for is a special id, and what lies between is not known."""
    file = read_tokenizer_file(folders["byte_level"])
    size = len(build_byte_table(file).pieces)
    table = build_byte_table(file, (size + 2,))
    assert table.is_known(np.array([size, size + 1, size + 2, size + 3])).tolist() == [False, False, True, False]
    assert table.is_special(np.array([size, size + 2])).tolist() == [False, True]
