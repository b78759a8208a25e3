"""The receiving end: turns a peer's bytes into own token ids, or rejects them with a reason.

A completion is read as a text of its own. Tokenizers with a dummy prefix write such a text with one phantom space in
front, which has no bytes; the receiver adds it when it encodes and takes it off when it reads own ids.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.byte_table import ByteTable, build_byte_table, fallback_ids
from mrl.alignment.encoders import PROBES, FileEncoder
from mrl.alignment.flags import Reason
from mrl.alignment.ragged import offsets_of, row_sums
from mrl.alignment.tokenizer_file import TokenizerFile, steps
from mrl.alignment.tokenizer_folder import find_eos, read_tokenizer
from mrl.alignment.tokenizer_refusals import text_fault
from mrl.errors import TokenizerRefused

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CutTexts:
    """R texts in own tokens, without EOS; T is the number of tokens of all rows. Faulty rows keep their tokens."""

    token_ids: Int32s
    """[T] own ids of all rows."""
    lengths: Int32s
    """[T] bytes of every token, the phantom space taken off."""
    offsets: Int64s
    """[R + 1] where each row's tokens start."""
    faults: dict[int, Reason]
    """Row -> why its tokens cannot be used."""


class Receiver:
    """One policy's tokenizer as a reader and writer of bytes.

    `eos_id` ends an own answer; `eos_ids` are all ids that end one. A receiver without any EOS has `eos_ids` empty: it
    can read bytes, and `eos_id` raises ValueError.
    """

    def __init__(self, file: TokenizerFile, *, eos_ids: tuple[int, ...]) -> None:
        self.fingerprint = file.fingerprint
        self.eos_ids = eos_ids
        self.reads_nfc = file.reads_nfc
        self.table: ByteTable = build_byte_table(file, eos_ids)
        self._fallback_ids = fallback_ids(file)
        self._prefix = " " if file.has_dummy_prefix else ""
        self._encoder = FileEncoder(file)

    @property
    def eos_id(self) -> int:
        """The id that closes an own answer."""
        if not self.eos_ids:
            raise ValueError("this tokenizer has no EOS")
        return self.eos_ids[0]

    def completion_bytes(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
        """Return the bytes of own ids; specials and EOS are zero-width, and a phantom space is taken off.

        The bytes may end inside a character when the answer was cut. Raises ValueError for a negative id.
        """
        return self.table.join(token_ids).removeprefix(self._prefix.encode())

    def byte_lengths(self, token_ids: npt.NDArray[np.integer], offsets: Int64s) -> Int32s:
        """Return [T] numbers of bytes of the own ids of R rows; those of a row sum to the length of its
        `completion_bytes`.

        Raises ValueError for a negative id.
        """
        lengths = self.table.lengths(token_ids)
        if self._prefix:
            self.table.take_off_prefix(lengths, token_ids, offsets)
        return lengths

    def unit_of(self, token_id: int, *, opens: bool) -> bytes | None:
        """Return the bytes that an own id adds to a text, or with `opens` to its beginning; b"" for an EOS, None for
        other specials.
        """
        if token_id in self.eos_ids:
            return b""
        piece = self.table.join([token_id])
        return (piece.removeprefix(self._prefix.encode()) if opens else piece) or None

    def id_of(self, unit: bytes, *, opens: bool) -> int | None:
        """Return the own id that adds these bytes to a text, or with `opens` to its beginning; None where none does."""
        prefix = self._prefix.encode() if opens else b""
        found = self._id_of_piece.get(prefix + unit)
        if found is None and not (prefix and unit.startswith(prefix)):  # else its own space would be the phantom one
            found = self._id_of_piece.get(unit)
        return found

    @functools.cached_property
    def _id_of_piece(self) -> dict[bytes, int]:
        """Bytes -> id. Of several ids with the same bytes it is the last one, as encoding looks for added tokens first;
        a fallback byte only where no other id has its byte.
        """
        found = {self.table.pieces[token_id]: token_id for token_id in self._fallback_ids}
        others = (one for one in enumerate(self.table.pieces) if one[1] and one[0] not in self._fallback_ids)
        return found | {piece: token_id for token_id, piece in others}

    def cut_texts(self, texts: Sequence[str], data: Sequence[bytes]) -> CutTexts:
        """Return own tokens of R texts; `data` holds their bytes. A reader of NFC faults a text that is not in NFC."""
        encoded = self._encoder.encode([self._prefix + text for text in texts] if self._prefix else texts)
        lengths = self.byte_lengths(encoded.token_ids, encoded.offsets)
        differing = self.rows_that_differ(encoded.token_ids, encoded.offsets, data)
        faults: dict[int, Reason] = dict.fromkeys(differing, "bytes_differ")
        is_special = self.table.is_special(encoded.token_ids)
        if is_special.any():
            rows = np.searchsorted(encoded.offsets, np.flatnonzero(is_special), side="right") - 1
            faults |= dict.fromkeys(rows.tolist(), "special_out")
        return CutTexts(encoded.token_ids, lengths, encoded.offsets, faults)

    def rows_that_differ(self, token_ids: npt.NDArray[np.integer], offsets: Int64s, data: Sequence[bytes]) -> list[int]:
        """Return the rows whose own ids do not stand for their bytes. Raises ValueError for a negative id."""
        prefix, joined = self._prefix.encode(), self.table.join(token_ids)
        found = row_sums(self.table.lengths(token_ids), offsets)
        sizes = np.fromiter(map(len, data), dtype=np.int64, count=len(data)) + len(prefix)
        if len(data) and np.array_equal(sizes, found) and joined == prefix + prefix.join(data):
            return []
        ends = offsets_of(found).tolist()
        return [n for n, text in enumerate(data) if joined[ends[n] : ends[n + 1]].removeprefix(prefix) != text]


def load_receiver(folder: Path, closing: str = "") -> Receiver:
    """Load the receiver of a model folder, or of its `tokenizer.json`.

    The EOS is read from the folder's configuration files. Of several, the one that comes first in `closing`, which is
    the chat template's text behind an answer, closes answers. Raises ModelFolderError for missing or malformed files or
    a folder without an EOS, and TokenizerRefused for a kind of tokenizer that is not supported, or one whose byte table
    does not reproduce the probe texts.
    """
    file = read_tokenizer(folder)
    return prove(Receiver(file, eos_ids=find_eos(file.path.parent, file, closing)), file)


def prove(receiver: Receiver, file: TokenizerFile) -> Receiver:
    """Return the receiver, once its byte table has reproduced the probe texts. Raises TokenizerRefused where it does
    not.
    """
    faults = receiver.cut_texts(PROBES, [probe.encode() for probe in PROBES]).faults
    if faults:
        first = min(faults)
        own_bytes = {receiver.table.pieces[token_id] for token_id in file.pieces}
        why = text_fault(steps(file.content.get("normalizer")), sum(bytes([byte]) in own_bytes for byte in range(256)))
        raise TokenizerRefused(
            "the tokenizer does not reproduce a probe text byte for byte" + (f": {why}" if why else ""),
            where=str(file.path),
            got=f"{faults[first]} on {PROBES[first]!r}",
            wanted="byte-level BPE (NFC at most), or metaspace BPE with all 256 byte tokens",
        )
    return receiver
