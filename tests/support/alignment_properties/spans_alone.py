"""Common spans of two segmentations, without any tokenizer."""

import itertools
from random import Random

import numpy as np

from mrl.alignment.shared_spans import align_batch
from tests.support.alignment_properties.definitions import Places, slow_spans
from tests.support.alignment_properties.generated import make_lengths

EXAMPLES = 60
Row = tuple[list[int], list[int]]


def make_row(random: Random) -> Row:
    """Draw two segmentations of the same number of bytes."""
    num_bytes = random.randint(1, 24)
    return make_lengths(random, num_bytes), make_lengths(random, num_bytes)


def align_rows(rows: list[Row]) -> list[Places]:
    """Run `align_batch` on lists; return token places by row and span."""
    flat = [np.array([n for row in rows for n in row[side]], dtype=np.int32) for side in (0, 1)]
    offsets = [np.array([0, *itertools.accumulate(len(row[side]) for row in rows)], dtype=np.int64) for side in (0, 1)]
    spans = align_batch(flat[0], offsets[0], flat[1], offsets[1])
    found = []
    for row in range(len(rows)):
        numbers = range(int(spans.row_starts[row]), int(spans.row_starts[row + 1]))
        sides = []
        for of_token, bounds in ((spans.of_peer, offsets[0]), (spans.of_receiver, offsets[1])):
            own = of_token[bounds[row] : bounds[row + 1]].tolist()
            assert own == sorted(own), "spans cover the tokens in order"
            assert set(own) == set(numbers), "every token is in a span of its row"
            sides.append([[place for place, span in enumerate(own) if span == number] for number in numbers])
        found.append(list(zip(*sides, strict=True)))
    return found


def check_spans_are_those_of_the_definition(receivers, random: Random) -> None:
    """Spans cover both sides, hold the same bytes, and no finer common partition exists."""
    for _ in range(EXAMPLES):
        rows = [make_row(random) for _ in range(random.randint(1, 6))]
        found = align_rows(rows)
        assert found == [slow_spans(*row) for row in rows]
        for (peer, own), spans in zip(rows, found, strict=True):
            for theirs, mine in spans:
                assert sum(peer[place] for place in theirs) == sum(own[place] for place in mine) > 0


def check_swapped_sides_give_swapped_spans(receivers, random: Random) -> None:
    """Spans do not depend on which side is the peer."""
    rows = [make_row(random) for _ in range(EXAMPLES)]
    swapped = align_rows([(own, peer) for peer, own in rows])
    assert align_rows(rows) == [[(peer, own) for own, peer in row] for row in swapped]


def check_refining_the_peer_never_lowers_the_span_count(receivers, random: Random) -> None:
    """Finer tokens have more boundaries, so at least as many are common; the finest give the receiver's own."""
    for _ in range(EXAMPLES):
        peer, own = make_row(random)
        finer = [part for length in peer for part in ([1] * length if random.random() < 0.5 else [length])]
        coarse, fine, finest = align_rows([(peer, own), (finer, own), ([1] * sum(own), own)])
        assert len(coarse) <= len(fine) <= len(finest) == sum(length > 0 for length in own)
