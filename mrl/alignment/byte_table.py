"""Token id -> bytes, from the vocabulary alone.

byte-level   inverse of GPT-2's byte-to-character map, one character = one byte
metaspace    `<0xNN>` is the byte NN; in other pieces the metaspace character is a space and the rest is UTF-8
added        byte-level: the literal UTF-8 of the content; metaspace: as other pieces, since the decoder does the same
special      no bytes

Tables are read flat: N ids of many rows at once.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.tokenizer_file import METASPACE, Kind, TokenizerFile

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteTable:
    """Bytes of every id. Ids without bytes (specials, holes, rows that only pad the embedding) are zero-width."""

    def __init__(self, pieces: Sequence[bytes], special_ids: frozenset[int]) -> None:
        self.pieces = tuple(pieces)
        self.special_ids = special_ids
        num_ids = len(self.pieces)
        # One entry past the end stands for every id beyond the table.
        self._pieces = np.array([*self.pieces, b""], dtype=object)
        self._lengths = np.array([*map(len, self.pieces), 0], dtype=np.int32)
        self._opens_with_space = np.array([*(piece.startswith(b" ") for piece in self.pieces), False])
        self._is_special = np.zeros(num_ids + 1, dtype=bool)
        self._is_special[list(special_ids)] = True
        self._is_known = self._is_special | (self._lengths > 0)

    def join(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
        """Return the bytes that the ids stand for, one after the other; ids beyond the table are zero-width.

        Raises ValueError for a negative id.
        """
        return b"".join(self._pieces[self._index(np.asarray(token_ids, dtype=np.int64))].tolist())

    def lengths(self, token_ids: npt.NDArray[Any]) -> Int32s:
        """Return [N] numbers of bytes of every id. Raises ValueError for a negative id."""
        lengths: Int32s = self._lengths[self._index(token_ids)]
        return lengths

    def is_special(self, token_ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return [N] whether each id is a special one. Raises ValueError for a negative id."""
        is_special: npt.NDArray[np.bool_] = self._is_special[self._index(token_ids)]
        return is_special

    def is_known(self, token_ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return [N] whether each id stands for bytes or is special; holes, padding and negative ids are neither."""
        is_known: npt.NDArray[np.bool_] = (token_ids >= 0) & self._is_known[np.clip(token_ids, 0, len(self.pieces))]
        return is_known

    def take_off_prefix(self, lengths: Int32s, token_ids: npt.NDArray[Any], offsets: Int64s) -> None:
        """Take one byte, in place, off the first token with bytes of every row where that token opens with a space."""
        audible = np.flatnonzero(lengths)
        place = np.searchsorted(audible, offsets[:-1])
        first = audible[place[place < len(audible)]]
        first = first[first < offsets[1:][place < len(audible)]]
        lengths[first[self._opens_with_space[self._index(token_ids[first])]]] -= 1

    def _index(self, token_ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if len(token_ids) and token_ids.min() < 0:
            raise ValueError("token ids must not be negative")
        index: npt.NDArray[Any] = np.minimum(token_ids, len(self.pieces))
        return index


def build_byte_table(file: TokenizerFile, silent_ids: Sequence[int] = ()) -> ByteTable:
    """Build the table of one tokenizer file; `silent_ids` are special too, whatever the file says.

    A piece that stands for no bytes counts as special: it must never be emitted.
    """
    found = {index: piece_bytes(piece, file.kind) for index, piece in file.pieces.items()}
    for token in file.added_tokens:
        literal = (
            str(token["content"]).encode() if file.kind == "byte_level" else piece_bytes(token["content"], file.kind)
        )
        found[int(token["id"])] = None if token.get("special") else literal
    found |= dict.fromkeys(silent_ids)
    pieces = [found.get(index) or b"" for index in range(max(found) + 1)]
    return ByteTable(pieces, frozenset(index for index, piece in found.items() if piece is None))


def fallback_ids(file: TokenizerFile) -> frozenset[int]:
    """Return the ids of single bytes with which a metaspace tokenizer writes characters that no other piece has."""
    pieces = file.pieces.items() if file.kind == "metaspace" else ()
    return frozenset(index for index, piece in pieces if BYTE_PIECE.fullmatch(piece))


def piece_bytes(piece: str, kind: Kind) -> bytes | None:
    """Return the bytes of one vocabulary piece; None when it stands for none.

    >>> piece_bytes("\\u0120caf\\u00c3\\u00a9", "byte_level")
    b' caf\\xc3\\xa9'
    >>> piece_bytes("<0x0A>", "metaspace")
    b'\\n'
    """
    if kind == "metaspace":
        match = BYTE_PIECE.fullmatch(piece)
        return bytes([int(match[1], 16)]) if match else piece.replace(METASPACE, " ").encode()
    known = _byte_of_character()
    return bytes(known[c] for c in piece) if all(c in known for c in piece) else None


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return the inverse of GPT-2's map: printable Latin-1 bytes are themselves, the other 68 follow from U+0100 in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}
