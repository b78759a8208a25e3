"""Token id -> bytes, from the vocabulary alone.

byte-level   inverse of GPT-2's byte-to-character map, one character = one byte
metaspace    `<0xNN>` is that byte; in other pieces the metaspace character is a space and the rest is UTF-8
added        byte-level: the literal UTF-8 of the content; metaspace: as other pieces, since the decoder does the same
special      no bytes
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrl.alignment.tokenizer_file import METASPACE, Kind, TokenizerFile

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteTable:
    """The bytes of every id. Ids without bytes (specials, holes, rows that only pad the embedding) are zero-width."""

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]

    def join(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
        """The bytes that the ids stand for, one after the other; ids beyond the table are zero-width.

        Raises ValueError for a negative id.
        """
        ids = [int(token_id) for token_id in token_ids]
        if any(token_id < 0 for token_id in ids):
            raise ValueError("token ids are not negative")
        return b"".join(self.pieces[token_id] for token_id in ids if token_id < len(self.pieces))


def build_byte_table(file: TokenizerFile) -> ByteTable:
    """The table of one tokenizer file. A piece that stands for no bytes counts as special: it must never be emitted."""
    found = {index: piece_bytes(piece, file.kind) for index, piece in file.pieces.items()}
    for token in file.added_tokens:
        literal = (
            str(token["content"]).encode() if file.kind == "byte_level" else piece_bytes(token["content"], file.kind)
        )
        found[int(token["id"])] = None if token.get("special") else literal
    pieces = tuple(found.get(index) or b"" for index in range(max(found) + 1))
    return ByteTable(pieces, frozenset(index for index, piece in found.items() if piece is None))


def piece_bytes(piece: str, kind: Kind) -> bytes | None:
    """The bytes of one vocabulary piece; None when it stands for none.

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


def _byte_of_character() -> dict[str, int]:
    """Inverse of GPT-2's map: printable Latin-1 bytes are themselves, the other 68 follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}
