"""Log-probabilities of receiver tokens, spread from those of spans."""

from random import Random

import numpy as np

from mrl.alignment.spreading import SPREADING
from mrl.alignment.translate import AlignedBatch, translate_batch
from tests.support.alignment_properties.batches_and_limits import mixed_batch
from tests.support.alignment_properties.generated import make_batch
from tests.support.alignment_properties.kinds import KINDS, Receivers


def make_batch_of(random: Random, receivers: Receivers, kind: str) -> AlignedBatch:
    """Translate a batch with rows that are whole, cut and refused."""
    return translate_batch(mixed_batch(random, receivers, kind, 15), receivers[kind], max_tokens=25)


def slow_spread(name: str, total: float, sizes: np.ndarray) -> np.ndarray:
    """Apply a rule of `spreading` to one span: its log-probability, and the bytes of its tokens."""
    if name == "bytes" and sizes.sum():
        return total * sizes / sizes.sum()
    return np.full(len(sizes), total / len(sizes))


def check_spreading_keeps_the_total_of_every_span(receivers: Receivers, random: Random) -> None:
    """Every rule sums to the span's log-probability, copies it to a lone token, and follows its formula."""
    for kind in KINDS:
        batch = make_batch_of(random, receivers, kind)
        for name, rule in SPREADING.items():
            spread = rule(batch)
            for span, total in enumerate(batch.span_logprob):
                inside = batch.span_of_token == span
                part = spread[inside]
                assert abs(part.sum() - total) < 1e-9 * max(1, -total)
                if len(part) == 1:
                    assert part[0] == total
                expected = slow_spread(name, total, batch.token_bytes[inside])
                assert np.allclose(part, expected, rtol=0, atol=1e-9)
                assert (part <= 0).all()


def check_rows_spread_as_their_batch(receivers: Receivers, random: Random) -> None:
    """A rule gives a row alone the same numbers as inside its batch."""
    for kind in KINDS:
        batch = make_batch_of(random, receivers, kind)
        for rule in SPREADING.values():
            whole = rule(batch)
            for row in range(batch.num_rows):
                tokens = slice(*batch.row_offsets[row : row + 2])
                assert np.allclose(rule(batch.row(row)), whole[tokens], rtol=1e-12, atol=0)


def check_spreading_without_rows_is_empty(receivers: Receivers, random: Random) -> None:
    """Batches without any receiver token, of no rows or of refused ones, spread to nothing."""
    refused = [answer for answer in make_batch(random) if answer.completion]
    for answers in ([], refused):
        batch = translate_batch(answers, receivers["byte_level"], max_tokens=10_000)
        kept = int(batch.row_offsets[-1])
        for rule in SPREADING.values():
            assert rule(batch).shape == (kept,)
            assert np.isfinite(rule(batch)).all()
