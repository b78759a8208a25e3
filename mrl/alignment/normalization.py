"""Positions of the bytes of a text after a receiver has put it into NFC.

A character may combine with the one before it only when it is a combining character or the second half of a canonical
pair (a Hangul vowel after its consonant). A run of such characters with the character before it is a cluster. Between
clusters NFC changes nothing, and a cluster is normalised on its own. Positions outside changed clusters move along;
positions inside one have no counterpart, so no span may end there.
"""

import functools
import re
import sys
import unicodedata
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

HANGUL_VOWELS_AND_FINALS = range(0x1161, 0x11C3)


@dataclass(frozen=True, slots=True, eq=False)
class Normalized:
    """A text in NFC, and its C changed clusters as byte ranges before and after."""

    text: str
    old_starts: Int64s
    """[C] first byte of every changed cluster in the old text."""
    old_ends: Int64s
    """[C] end of every changed cluster in the old text, in bytes."""
    growth: Int64s
    """[C] bytes by which each cluster grew; negative where it shrank."""

    def map_lengths(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return [T] byte lengths of tokens in the new text.

        A token that ends inside a changed cluster gets no bytes: its bytes go to the token that leaves the cluster,
        with which it then shares a span.
        """
        ends = np.cumsum(lengths, dtype=np.int64)
        passed = np.searchsorted(self.old_ends, ends, side="right")
        entered = np.searchsorted(self.old_starts, ends, side="left")
        new_ends = ends + np.concatenate([[0], np.cumsum(self.growth)])[passed]
        new_ends[entered > passed] = 0
        return np.diff(np.maximum.accumulate(new_ends), prepend=0).astype(np.int32)


def normalize_nfc(text: str) -> Normalized | None:
    """Return the text in NFC, or None when it is in NFC already.

    >>> normalize_nfc("cafe\\u0301!").map_lengths(np.array([3, 1, 2, 1], dtype=np.int32)).tolist()
    [3, 0, 2, 1]
    """
    if text.isascii() or unicodedata.is_normalized("NFC", text):
        return None
    pieces: list[str] = []
    changes: list[tuple[int, int, int]] = []
    taken = old_bytes = 0
    for match in _clusters().finditer(text):
        new = unicodedata.normalize("NFC", match[0])
        if new == match[0]:
            continue
        start = old_bytes + len(text[taken : match.start()].encode())
        old_bytes = start + len(match[0].encode())
        changes.append((start, old_bytes, len(new.encode()) - (old_bytes - start)))
        pieces += [text[taken : match.start()], new]
        taken = match.end()
    if not changes:
        return None
    table = np.array(changes, dtype=np.int64).reshape(-1, 3)
    return Normalized("".join([*pieces, text[taken:]]), table[:, 0], table[:, 1], table[:, 2])


@functools.cache
def _clusters() -> re.Pattern[str]:
    """Return the pattern of one character and all that combine with it, at least one, or of a character that NFC
    replaces alone.
    """
    joining, replaced = [], []
    for code in range(0x80, sys.maxunicode + 1):
        decomposition = unicodedata.decomposition(character := chr(code))
        if unicodedata.combining(character) or code in HANGUL_VOWELS_AND_FINALS:
            joining.append(code)
        if not decomposition or decomposition.startswith("<"):
            continue
        parts = [int(part, 16) for part in decomposition.split()]
        if unicodedata.combining(unicodedata.normalize("NFD", character)[0]):
            joining.append(code)
        if not unicodedata.combining(chr(parts[-1])) and len(parts) > 1:
            joining.append(parts[-1])
        if not unicodedata.is_normalized("NFC", character):
            replaced.append(code)
    combining = "".join(f"\\U{code:08x}" for code in sorted(set(joining)))
    alone = "".join(f"\\U{code:08x}" for code in replaced)
    return re.compile(f"[\\s\\S][{combining}]+|[{alone}]")
