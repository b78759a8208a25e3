"""Rows of different lengths as one flat array and [R + 1] offsets."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]


def offsets_of(counts: npt.NDArray[Any]) -> Int64s:
    """Return [R + 1] positions where rows of these lengths start, and where the last row ends."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def row_sums(values: npt.NDArray[Any], offsets: Int64s) -> Int64s:
    """Return [R] sums of every row of integers or bools."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return np.diff(sums[offsets])


def rows_of(positions: Int64s, offsets: Int64s) -> Int64s:
    """Return the row of every position."""
    return np.searchsorted(offsets, positions, side="right") - 1


def spread_positions(starts: Int64s, counts: Int64s) -> Int64s:
    """Return the positions start, start + 1, ... of every row, one row after the other."""
    shift = starts - offsets_of(counts)[:-1]
    return np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(shift, counts)


def sums_at(places: npt.NDArray[Any], values: npt.NDArray[Any], num_places: int) -> npt.NDArray[np.float64]:
    """Return [num_places] sums of the values at every place, in double precision."""
    return np.bincount(places, weights=values, minlength=num_places).astype(np.float64, copy=False)
