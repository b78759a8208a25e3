"""The likeliest units in the place of a token under one policy, told as bytes and read in the tokens of another policy.

A unit is the bytes of one token of the teller, or an end, which has no bytes. It is read where one own token stands for
the same bytes: SimCT's shared tokens (arXiv 2605.07711). Units that no single own token stands for count as the rest,
together with all that is not among the likeliest.

Shapes: T tokens of the teller, S own tokens, K units of a place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Rejected
from mrl.alignment.peer_answer import LOGPROB_ROUNDING_NATS
from mrl.alignment.receiver import Receiver
from mrl.records.codec import pack_array, unpack_array
from mrl.records.experience import MAX_LIKELIEST, LikeliestUnits

Int32s: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]

PROBABILITY_ROUNDING = 1e-3
"""Excess over 1 that the sum of the probabilities of a place may have."""


@dataclass(frozen=True, slots=True, eq=False)
class NextUnits:
    """Units in the place of each of S own tokens, as own ids."""

    token_ids: Int32s
    """[S, K] own ids; 0 where there is no unit."""
    logprobs: Float32s
    """[S, K] log-probs in nats under the teller; NaN where there is no unit."""

    def packed(self) -> tuple[bytes, bytes]:
        """Return the raw bytes of ids and log-probs."""
        return pack_array(self.token_ids, "i4"), pack_array(self.logprobs, "f4")

    def at(self, places: npt.NDArray[np.intp], own_places: npt.NDArray[np.intp], num_tokens: int) -> "NextUnits":
        """Return units for `num_tokens` tokens, [num_tokens, K]: those of `places` in the places `own_places`, none
        elsewhere.
        """
        ids = np.zeros((num_tokens, self.token_ids.shape[1]), np.int32)
        logprobs = np.full(ids.shape, np.nan, np.float32)
        ids[own_places], logprobs[own_places] = self.token_ids[places], self.logprobs[places]
        return NextUnits(ids, logprobs)

    @classmethod
    def unpacked(cls, token_ids: bytes, logprobs: bytes, *, num_tokens: int) -> "NextUnits":
        """Return the units from the bytes of `packed`."""
        ids, nats = unpack_array(token_ids, "i4"), unpack_array(logprobs, "f4")
        return cls(ids.reshape(num_tokens, -1), nats.reshape(num_tokens, -1))


def encode_units(token_ids_TK: Int32s, logprobs_TK: Float32s, teller: Receiver) -> LikeliestUnits:
    """Return the wire form of the tokens that `teller` finds likeliest in the places of a text of its own, from its
    first place on.

    Tokens without bytes that end no answer are not told.
    """
    numbers: dict[bytes, int] = {}
    places_TK = np.full(token_ids_TK.shape, -1, dtype=np.int32)
    for rows, opens in ((slice(0, 1), True), (slice(1, None), False)):
        ids, place_of = np.unique(token_ids_TK[rows], return_inverse=True)
        units = [teller.unit_of(token_id, opens=opens) if token_id >= 0 else None for token_id in ids.tolist()]
        number_of = [-1 if unit is None else numbers.setdefault(unit, len(numbers)) for unit in units]
        if number_of:
            places_TK[rows] = np.array(number_of, dtype=np.int32)[place_of].reshape(places_TK[rows].shape)
    places_TK[~np.isfinite(logprobs_TK)] = -1
    told = np.where(places_TK < 0, 0.0, np.minimum(logprobs_TK, 0.0))
    return LikeliestUnits(units=list(numbers), places=pack_array(places_TK, "i4"), logprobs=pack_array(told, "f4"))


def decode_units(
    told: LikeliestUnits, num_tokens: int, reader: Receiver, *, end_id: int | None = None
) -> NextUnits | Rejected:
    """Return [T, K] the told units as ids of `reader`, an end as `end_id`; Rejected for numbers that cannot be."""
    if len(told.places) % 4 or len(told.places) != len(told.logprobs) or not num_tokens:
        return Rejected("shape")
    places, logprobs = unpack_array(told.places, "i4"), unpack_array(told.logprobs, "f4")
    if places.size % num_tokens:
        return Rejected("shape")
    if places.size > MAX_LIKELIEST * num_tokens:
        return Rejected("size")
    places_TK, logprobs_TK = places.reshape(num_tokens, -1), logprobs.reshape(num_tokens, -1).astype(np.float64)
    is_told = places_TK >= 0
    if (places_TK >= len(told.units)).any():
        return Rejected("shape")
    with np.errstate(all="ignore"):
        masses = np.where(is_told, np.exp(logprobs_TK), 0.0)
        is_credible = (logprobs_TK <= LOGPROB_ROUNDING_NATS) | ~is_told  # False for a told NaN
    if not is_credible.all() or (masses.sum(-1) > 1 + PROBABILITY_ROUNDING).any():
        return Rejected("logprobs")
    ids_TK = np.full(places_TK.shape, -1, dtype=np.int32)
    for rows, opens in ((slice(0, 1), True), (slice(1, None), False)):
        found = [reader.id_of(unit, opens=opens) if unit else end_id for unit in told.units]
        own = np.array([*(-1 if one is None else one for one in found), -1], dtype=np.int32)
        ids_TK[rows] = own[np.where(is_told[rows], places_TK[rows], -1)]
    return _merged(ids_TK, masses)


def _merged(ids_TK: Int32s, masses_TK: npt.NDArray[np.float64]) -> NextUnits:
    """Return each own id once in a place: two tokens of the teller may stand for the same bytes, as its ends do."""
    order_TK = np.argsort(ids_TK, axis=-1, kind="stable")
    ids_TK, masses_TK = np.take_along_axis(ids_TK, order_TK, -1), np.take_along_axis(masses_TK, order_TK, -1)
    for rank in range(ids_TK.shape[1] - 1):
        is_same_T = ids_TK[:, rank] == ids_TK[:, rank + 1]
        masses_TK[is_same_T, rank + 1] += masses_TK[is_same_T, rank]
        ids_TK[is_same_T, rank] = -1
    is_unit_TK = (ids_TK >= 0) & (masses_TK > 0)
    with np.errstate(divide="ignore"):
        logprobs_TK = np.where(is_unit_TK, np.log(masses_TK), np.nan)
    return NextUnits(np.where(is_unit_TK, ids_TK, 0).astype(np.int32), logprobs_TK.astype(np.float32))


def no_units(num_tokens: int) -> NextUnits:
    """Return no units for `num_tokens` tokens."""
    return NextUnits(np.zeros((num_tokens, 0), np.int32), np.zeros((num_tokens, 0), np.float32))


def joined_units(parts: Sequence[NextUnits]) -> NextUnits:
    """Return the units of several texts, one after the other."""
    most = max(part.token_ids.shape[1] for part in parts)
    wide = [((0, 0), (0, most - part.token_ids.shape[1])) for part in parts]
    ids = [np.pad(part.token_ids, more) for part, more in zip(parts, wide, strict=True)]
    nats = [np.pad(part.logprobs, more, constant_values=np.nan) for part, more in zip(parts, wide, strict=True)]
    return NextUnits(np.concatenate(ids), np.concatenate(nats))
