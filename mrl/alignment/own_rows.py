"""The receiver's side of a batch: own tokens for every row that can be expressed.

Shapes: L rows that are carried over, T receiver tokens of all of them.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Flag, Reason
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.peer_rows import PeerRows, read_texts
from mrl.alignment.ragged import offsets_of, row_sums, rows_of, spread_positions
from mrl.alignment.receiver import Receiver

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """Own tokens of L rows, as flat arrays."""

    rows: Int64s
    """[L] numbers of the rows in the batch, ascending."""
    offsets: Int64s
    """[L + 1] where each row's tokens start."""
    token_ids: Int32s
    """[T] own ids, EOS included where it is carried over."""
    lengths: Int32s
    """[T] lengths for finding spans: bytes, 1 for EOS; all 1 in rows that pass untouched, so that every token is a
    span."""
    text_lengths: Int32s
    """[T] text bytes of every token; 0 for EOS."""


def own_rows(peer: PeerRows, receiver: Receiver) -> OwnRows:
    """Return own tokens for all rows of `peer` without a fault; write new faults, flags and lengths into `peer`."""
    same: list[int] = []
    other: list[int] = []
    for row, answer in enumerate(peer.answers):
        if row not in peer.faults:
            is_same = answer.fingerprint == receiver.fingerprint and answer.token_ids is not None
            (same if is_same else other).append(row)
    translated = _translate(peer, receiver, other)
    return _in_order(translated, _pass_through(peer, receiver, same)) if same else translated


def _pass_through(peer: PeerRows, receiver: Receiver, rows: list[int]) -> OwnRows:
    """Return rows of the same tokenizer: the ids as they are, once they are seen to stand for what the answer says.

    A row without ids is rejected as "empty". It is rejected as "ids_differ" where an id is not known (nothing can be
    learnt from a row that only pads the embedding), or the ids stand for another text, other byte lengths or other
    specials than the answer says. Equal fingerprints do not mean equal EOS: the end of a row, and the specials before
    its end, are read from the ids.
    """
    ids = [ids for row in rows if (ids := peer.answers[row].token_ids) is not None]
    faults: dict[int, Reason] = {row: "empty" for row, own in zip(rows, ids, strict=True) if not own.size}
    faults |= {row: "ids_differ" for row, own in zip(rows, ids, strict=True) if own.size and own.min() < 0}
    sound = [(row, own) for row, own in zip(rows, ids, strict=True) if row not in faults]
    offsets = offsets_of(np.array([len(own) for _, own in sound], dtype=np.int64))
    flat = np.concatenate([np.zeros(0, np.int32), *(own for _, own in sound)])
    text_lengths = receiver.byte_lengths(flat, offsets)
    wrong = _misdescribed(receiver, flat, offsets, text_lengths, [peer.answers[row] for row, _ in sound])
    peer.reject(faults | {sound[place][0]: "ids_differ" for place in wrong})
    places = np.array([place for place in range(len(sound)) if place not in wrong], dtype=np.int64)
    kept_rows = np.array([sound[place][0] for place in places], dtype=np.int64)
    tokens = spread_positions(offsets[places], np.diff(offsets)[places])
    peer.lengths[spread_positions(peer.offsets[kept_rows], peer.kept[kept_rows])] = 1
    own = OwnRows(
        kept_rows,
        offsets_of(np.diff(offsets)[places]),
        flat[tokens],
        np.ones(len(tokens), np.int32),
        text_lengths[tokens],
    )
    _flag_ends(peer, own, receiver)
    return own


def _misdescribed(
    receiver: Receiver, flat: Int32s, offsets: Int64s, text_lengths: Int32s, answers: list[PeerAnswer]
) -> set[int]:
    """Return the places of answers with unknown ids, or whose text, byte lengths or special marks are not those of
    their ids.
    """
    told = np.concatenate([np.zeros(0, np.int32), *(answer.byte_lengths for answer in answers)])
    marked = np.concatenate([np.zeros(0, bool), *(answer.special for answer in answers)])
    is_odd = ~receiver.table.is_known(flat) | (told != text_lengths) | (marked != receiver.table.is_special(flat))
    wrong = set(receiver.rows_that_differ(flat, offsets, [answer.completion for answer in answers]))
    return wrong | set(rows_of(np.flatnonzero(is_odd), offsets).tolist())


def _flag_ends(peer: PeerRows, own: OwnRows, receiver: Receiver) -> None:
    """Set SPECIAL_IN and EOS_UNMAPPED of rows that pass untouched, as their ids say."""
    ends_well = np.isin(own.token_ids[own.offsets[1:] - 1], receiver.eos_ids)
    has_special = row_sums(receiver.table.is_special(own.token_ids), own.offsets) > ends_well
    finished = np.array([peer.answers[row].finished for row in own.rows.tolist()], dtype=bool)
    peer.flags[own.rows] &= ~int(Flag.SPECIAL_IN)
    peer.flags[own.rows] |= has_special * Flag.SPECIAL_IN | (finished & ~ends_well) * Flag.EOS_UNMAPPED


def _translate(peer: PeerRows, receiver: Receiver, rows: list[int]) -> OwnRows:
    """Return rows of other tokenizers: encode the text, compare the bytes, map the end."""
    readable, texts, data = read_texts(peer, rows, nfc=receiver.reads_nfc)
    cut = receiver.cut_texts(texts, data)
    peer.reject({readable[place]: reason for place, reason in cut.faults.items()})
    live = np.array([place not in cut.faults for place in range(len(readable))], dtype=bool)
    used = np.array(readable, dtype=np.int64)[live]
    token_ids, lengths, counts = cut.token_ids, cut.lengths, np.diff(cut.offsets)[live]
    if cut.faults:
        tokens = spread_positions(cut.offsets[:-1][live], counts)
        token_ids, lengths = token_ids[tokens], lengths[tokens]
    has_eos = _map_ends(peer, used, can_end=bool(receiver.eos_ids))
    offsets = offsets_of(counts + has_eos)
    is_text = np.ones(int(offsets[-1]), dtype=bool)
    is_text[offsets[1:][has_eos] - 1] = False
    with_eos = np.full(len(is_text), receiver.eos_id if receiver.eos_ids else 0, dtype=np.int32)
    with_eos[is_text] = token_ids
    text_lengths = np.zeros(len(is_text), dtype=np.int32)
    text_lengths[is_text] = lengths
    return OwnRows(used, offsets, with_eos, text_lengths + ~is_text, text_lengths)


def _map_ends(peer: PeerRows, rows: Int64s, *, can_end: bool) -> npt.NDArray[np.bool_]:
    """Return [L] whether the row gets an own EOS. The peer's becomes one virtual byte, or is dropped without
    counterpart.
    """
    ends = np.array([peer.answers[row].ends_with_eos for row in rows.tolist()], dtype=bool)
    finished = np.array([peer.answers[row].finished for row in rows.tolist()], dtype=bool)
    is_whole = peer.kept[rows] == np.diff(peer.offsets)[rows]
    has_eos: npt.NDArray[np.bool_] = ends & is_whole & can_end
    peer.flags[rows[finished & is_whole & ~has_eos]] |= Flag.EOS_UNMAPPED
    peer.lengths[peer.offsets[rows[has_eos]] + peer.kept[rows[has_eos]] - 1] = 1
    peer.kept[rows[ends & is_whole & ~has_eos]] -= 1
    return has_eos


def _in_order(one: OwnRows, other: OwnRows) -> OwnRows:
    """Join two sets of rows, ascending."""
    rows = np.concatenate([one.rows, other.rows])
    order = np.argsort(rows)
    starts = np.concatenate([one.offsets[:-1], other.offsets[:-1] + one.offsets[-1]])
    counts = np.concatenate([np.diff(one.offsets), np.diff(other.offsets)])
    tokens = spread_positions(starts[order], counts[order])

    def joined(name: str) -> Int32s:
        values: Int32s = np.concatenate([getattr(one, name), getattr(other, name)])[tokens]
        return values

    names = ("token_ids", "lengths", "text_lengths")
    return OwnRows(rows[order], offsets_of(counts[order]), *map(joined, names))
