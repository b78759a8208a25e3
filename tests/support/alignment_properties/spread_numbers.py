"""Numbers per receiver token, from numbers per span: log-probs and advantages."""

import itertools
from random import Random

import numpy as np

from mrl.alignment.spreading import SPREADING, advantages_to_receiver
from mrl.alignment.translate import AlignedBatch, translate_batch
from tests.support.alignment_properties.batches_and_limits import mixed_batch
from tests.support.alignment_properties.generated import make_batch
from tests.support.alignment_properties.kinds import KINDS, Receivers
from tests.support.alignment_properties.raising import never_raises


def make_batch_of(random: Random, receivers: Receivers, kind: str) -> AlignedBatch:
    """Rows that are whole, cut and refused."""
    return translate_batch(mixed_batch(random, receivers, kind, 15), receivers[kind], max_tokens=25)


def slow_spread(name: str, total: float, old: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The rules of `spreading` for one span: its log-prob, the receiver's own log-probs and the bytes of its tokens."""
    count = len(old)
    equal = np.full(count, total / count)
    match name:
        case "none":
            return np.array([0.0] * (count - 1) + [total])
        case "bytes":
            return total * sizes / sizes.sum() if sizes.sum() else equal
        case "receiver_additive":
            return old + (total - old.sum()) / count
        case "receiver_multiplicative":
            return total * old / old.sum() if old.sum() else equal
    return equal


def check_spreading_keeps_the_total_of_every_span(receivers: Receivers, random: Random) -> None:
    """Every rule sums to the span's log-prob, copies it where a token is alone, and follows its formula."""
    for kind in KINDS:
        batch = make_batch_of(random, receivers, kind)
        own = np.array([-random.random() * 3 for _ in batch.token_ids])
        own[: len(own) // 4] = 0.0
        own[-len(own) // 4 :] *= 1e4
        for name, rule in SPREADING.items():
            spread = rule(batch, own)
            for span, total in enumerate(batch.span_logprob):
                inside = batch.span_of_token == span
                part = spread[inside]
                assert abs(part.sum() - total) < 1e-9 * max(1, -total)
                if len(part) == 1:
                    assert part[0] == total
                expected = slow_spread(name, total, own[inside], batch.token_bytes[inside])
                assert np.allclose(part, expected, rtol=0, atol=1e-9)
                assert name == "receiver_additive" or (part <= 0).all()


def check_rows_spread_as_their_batch(receivers: Receivers, random: Random) -> None:
    """A rule gives one row what it gives the row inside its batch."""
    for kind in KINDS:
        batch = make_batch_of(random, receivers, kind)
        own = np.array([-random.random() * 3 for _ in batch.token_ids])
        for rule in SPREADING.values():
            whole = rule(batch, own)
            for row in range(batch.num_rows):
                tokens = slice(*batch.row_offsets[row : row + 2])
                assert np.allclose(rule(batch.row(row), own[tokens]), whole[tokens], rtol=1e-12, atol=0)


def check_spreading_survives_odd_log_probs(receivers: Receivers, random: Random) -> None:
    """Own log-probs that are 0, infinite, NaN or a little above 0 give finite parts that keep the total."""
    batch = make_batch_of(random, receivers, "byte_level")
    for odd in (0.0, -np.inf, np.nan, 1e-6, -1e-300):
        own = np.array([odd if random.random() < 0.4 else -random.random() for _ in batch.token_ids])
        for name, rule in SPREADING.items():
            with never_raises((name, odd)):
                spread = rule(batch, own)
            assert np.isfinite(spread).all(), (name, odd)
            sums = np.array([spread[batch.span_of_token == span].sum() for span in range(len(batch.span_logprob))])
            assert np.allclose(sums, batch.span_logprob, rtol=1e-9, atol=1e-9), (name, odd)
            assert name == "receiver_additive" or (spread <= 0).all(), (name, odd)


def check_spreading_without_rows_is_empty(receivers: Receivers, random: Random) -> None:
    """Batches without any receiver token, of no rows or of refused ones, spread to nothing."""
    refused = [answer for answer in make_batch(random) if answer.completion]
    for answers in ([], refused):
        batch = translate_batch(answers, receivers["byte_level"], max_tokens=10_000)
        kept = int(batch.row_offsets[-1])
        for rule in SPREADING.values():
            assert rule(batch, np.zeros(kept)).shape == (kept,)
            assert np.isfinite(rule(batch, np.zeros(kept))).all()


def check_advantages_are_byte_weighted_means(receivers: Receivers, random: Random) -> None:
    """Dense advantages become the mean over the peer's bytes of the span; scalars are broadcast."""
    for kind in KINDS:
        batch = make_batch_of(random, receivers, kind)
        dense = np.array([random.gauss(0, 1) for _ in batch.peer_logprobs])
        moved = advantages_to_receiver(batch, dense)
        for token, span in enumerate(batch.span_of_token):
            inside = batch.peer_span_of_token == span
            weights = batch.peer_token_bytes[inside]
            mean = np.average(dense[inside], weights=weights if weights.sum() else None)
            assert abs(moved[token] - mean) < 1e-12
        scalars = np.array([random.gauss(0, 1) for _ in range(batch.num_rows)])
        rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_offsets))
        assert (advantages_to_receiver(batch, scalars, per_row=True) == scalars[rows]).all()


def check_a_constant_advantage_stays(receivers: Receivers, random: Random) -> None:
    """To the last bit, for any constant, and per row where rows have different ones."""
    for kind, constant in itertools.product(KINDS, (0.3, -1e-7, 1e6 / 3)):
        batch = make_batch_of(random, receivers, kind)
        assert (advantages_to_receiver(batch, np.full(len(batch.peer_logprobs), constant)) == constant).all()
        values = np.array([random.gauss(0, 1) for _ in range(batch.num_rows)])
        dense = np.repeat(values, np.diff(batch.peer_offsets))
        assert (advantages_to_receiver(batch, dense) == advantages_to_receiver(batch, values, per_row=True)).all()
