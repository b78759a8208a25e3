"""Peer answers as flat arrays, and the part of them that can be read as text.

A text is cut where its bytes stop being UTF-8, back to the end of a peer token; the tokens after the cut are dropped.
For a receiver that reads NFC the text is normalised, and the peer's tokens get the lengths that their bytes have then.
Shapes: R rows, P peer tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Flag, Reason
from mrl.alignment.normalization import normalize_nfc
from mrl.alignment.peer_answer import Int32s, PeerAnswer, form_fault, number_faults
from mrl.alignment.ragged import offsets_of, row_sums

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class PeerRows:
    """R answers as flat arrays. Rows with fields that are wrong have no tokens."""

    answers: Sequence[PeerAnswer]
    offsets: Int64s
    """[R + 1] where each row's tokens start."""
    byte_lengths: Int32s
    """[P] bytes of every token, as given."""
    logprobs: npt.NDArray[np.float32]
    """[P] log-prob of every token in nats."""
    lengths: Int32s
    """[P] bytes of every token as the receiver reads them; 1 for an EOS that is carried over."""
    kept: Int64s
    """[R] number of the row's tokens that are used, from its start."""
    flags: Int32s
    """[R] `Flag` bits."""
    faults: dict[int, Reason]
    """Row -> why the row cannot be used."""

    def reject(self, faults: dict[int, Reason]) -> None:
        """Use no tokens of these rows, and record why."""
        self.faults |= faults
        self.kept[list(faults)] = 0


def read_peer_rows(answers: Sequence[PeerAnswer]) -> PeerRows:
    """Read answers into flat arrays, with the flags that follow from the answers alone."""
    faults: dict[int, Reason] = {}
    for row, answer in enumerate(answers):
        fault = form_fault(answer)
        if fault:
            faults[row] = fault
    formed = [row for row in range(len(answers)) if row not in faults]
    lying = number_faults([answers[row] for row in formed])
    faults |= {formed[place]: reason for place, reason in lying.items()}
    believed = [None if row in faults else answer for row, answer in enumerate(answers)]
    offsets = offsets_of(np.array([len(answer.special) if answer else 0 for answer in believed], dtype=np.int64))
    used = [answer for answer in believed if answer]
    lengths = np.concatenate([np.zeros(0, np.int32), *(answer.byte_lengths for answer in used)])
    logprobs = np.concatenate([np.zeros(0, np.float32), *(answer.logprobs for answer in used)])
    special = np.concatenate([np.zeros(0, bool), *(answer.special for answer in used)])
    is_cut = np.array([answer is not None and not answer.finished for answer in believed], dtype=bool)
    is_odd = np.array([answer is not None and answer.noncanonical for answer in believed], dtype=bool)
    is_bare = np.array([answer is not None and not answer.traced for answer in believed], dtype=bool)
    ends_well = np.array([answer is not None and answer.ends_with_eos for answer in believed], dtype=bool)
    has_special = row_sums(special, offsets) > ends_well
    flags = is_cut * Flag.TAIL | is_odd * Flag.NONCANON | has_special * Flag.SPECIAL_IN | is_bare * Flag.UNTRACED
    return PeerRows(
        answers, offsets, lengths, logprobs, lengths.copy(), np.diff(offsets), flags.astype(np.int32), faults
    )


def read_texts(rows: PeerRows, wanted: Sequence[int], *, nfc: bool) -> tuple[list[int], list[str], list[bytes]]:
    """Return the rows among `wanted` that can be read, their texts, and the bytes of these."""
    readable: list[int] = []
    texts: list[str] = []
    data: list[bytes] = []
    for row in wanted:
        completion = rows.answers[row].completion
        try:
            text = completion.decode()
        except UnicodeDecodeError as error:
            completion = _cut(rows, row, error.start)
            text = completion.decode()
        if not completion:
            rows.reject({row: "utf8" if rows.answers[row].completion else "empty"})
            continue
        if nfc and not text.isascii():
            text, completion = _normalize(rows, row, text, completion)
        readable.append(row)
        texts.append(text)
        data.append(completion)
    return readable, texts, data


def _cut(rows: PeerRows, row: int, valid_bytes: int) -> bytes:
    """Cut a row, in place, after the last peer token that ends with a whole character; return the bytes up to there."""
    answer = rows.answers[row]
    ends = np.cumsum(answer.byte_lengths, dtype=np.int64)
    data = np.frombuffer(answer.completion, dtype=np.uint8)
    ends = ends[ends <= valid_bytes]
    whole = np.flatnonzero((ends == valid_bytes) | ((data[np.minimum(ends, len(data) - 1)] & 0xC0) != 0x80))
    rows.kept[row] = whole[-1] + 1 if len(whole) else 0
    rows.flags[row] |= Flag.TAIL
    return answer.completion[: int(ends[whole[-1]]) if len(whole) else 0]


def _normalize(rows: PeerRows, row: int, text: str, data: bytes) -> tuple[str, bytes]:
    """Return the text and its bytes in NFC; the row's token lengths change in place."""
    normalized = normalize_nfc(text)
    if normalized is None:
        return text, data
    tokens = slice(rows.offsets[row], rows.offsets[row] + rows.kept[row])
    rows.lengths[tokens] = normalized.map_lengths(rows.byte_lengths[tokens])
    rows.flags[row] |= Flag.NORM
    return normalized.text, normalized.text.encode()
