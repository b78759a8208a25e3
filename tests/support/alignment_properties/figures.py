"""Figures of the loss of a translation: residuals of batches and of single rows, and the coverage of pair cards."""

import dataclasses
import itertools
import math
from collections import Counter
from random import Random

import numpy as np

from mrl.alignment.flags import Flag
from mrl.alignment.pair_card import coverage_of, span_texts, translated
from mrl.alignment.peer_answer import bare_text
from mrl.alignment.residual import KINDS as SPAN_KINDS
from mrl.alignment.residual import Residual, effective_share, summarise
from mrl.alignment.selection import select_rows
from mrl.alignment.translate import AlignedBatch, translate_batch
from tests.support.alignment_properties.generated import make_batch, make_text
from tests.support.alignment_properties.kinds import KINDS, METASPACE, Receivers
from tests.support.alignment_properties.raising import never_raises
from tests.support.alignment_properties.spread_numbers import make_batch_of


def close(one: float, other: float) -> bool:
    """Whether two numbers are equal up to rounding; NaN equals NaN."""
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))


def own_logprobs(random: Random, batch: AlignedBatch) -> np.ndarray:
    """Draw log-probabilities of the receiver's tokens, some of them far from the peer's."""
    return np.array([-random.random() * random.choice((0.3, 2, 9)) for _ in batch.token_ids])


def slow_differences(batch: AlignedBatch, own: np.ndarray, row: int) -> list[float]:
    """Return d_s of one row's spans: own log-probabilities of a span minus the peer's."""
    spans = np.flatnonzero(batch.span_row == row)
    return [float(own[batch.span_of_token == span].sum() - batch.span_logprob[span]) for span in spans]


def slow_ess(log_weights: list[float]) -> float:
    """Return (sum w)^2 / (n sum w^2)."""
    weights = [math.exp(value) for value in log_weights]
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))


def slow_kind(theirs: int, mine: int) -> str:
    """Name of a span's kind: 1:1, 1:n, n:1 or m:n tokens, the peer's first."""
    return {
        (False, False): "one_to_one",
        (False, True): "one_to_many",
        (True, False): "many_to_one",
        (True, True): "many_to_many",
    }[theirs > 1, mine > 1]


def row_of(batch: AlignedBatch, own: np.ndarray, row: int) -> Residual:
    """Return the residual of one row as a batch of its own."""
    return summarise(select_rows(batch, [row]), own[batch.row_offsets[row] : batch.row_offsets[row + 1]])


def check_residual_rows_follow_their_spans(receivers: Receivers, random: Random) -> None:
    """Counts, gap, spread and share out of band of every row are those of a walk over its spans."""
    for kind in KINDS:
        batch = make_batch_of(random, receivers, kind)
        own = own_logprobs(random, batch)
        for row in range(batch.num_rows):
            trace, found = batch.row(row), row_of(batch, own, row)
            pairs = list(zip(trace.span_peer_tokens.tolist(), trace.span_receiver_tokens.tolist(), strict=True))
            kinds = [slow_kind(*pair) for pair in pairs]
            for name in SPAN_KINDS:
                widths = [mine for (_, mine), theirs in zip(pairs, kinds, strict=True) if theirs == name]
                assert found.tokens_of_kind[name] == sum(widths)
            assert found.spans == len(kinds)
            ones = [size for size, name in zip(trace.span_bytes.tolist(), kinds, strict=True) if name == "one_to_one"]
            assert found.one_to_one_bytes == sum(ones)
            assert found.bytes == trace.span_bytes.sum()
            assert found.receiver_tokens == len(trace.token_ids)
            assert found.peer_tokens + found.dropped_tokens == len(trace.peer_span_of_token)
            assert (found.peer_nats, found.dropped_nats) == (trace.peer_logprob, trace.dropped_logprob)
            assert found.dropped_tokens == trace.dropped_tokens
            assert found.flagged == {flag.name: 1 for flag in Flag if trace.flags & flag}
            expect_differences(found, slow_differences(batch, own, row))


def expect_differences(found: Residual, differences: list[float]) -> None:
    """Check the four figures of d_s of one row; they are None where it has no span."""
    figures = found.gap_nats, found.span_std_nats, found.span_p95_nats, found.outside_band
    if not differences:
        assert figures == (None,) * 4
        return
    far = [not math.log(0.8) <= value <= math.log(1.2) for value in differences]
    wanted = sum(differences), np.std(differences), np.quantile(np.abs(differences), 0.95), sum(far) / len(far)
    assert all(close(mine, float(slow)) for mine, slow in zip(figures, wanted, strict=True))


def check_residual_totals_are_sums_of_rows(receivers: Receivers, random: Random) -> None:
    """The residual of a batch is the sum of its rows' residuals; no token or nat is missing."""
    for kind in KINDS:
        batch = make_batch_of(random, receivers, kind)
        own = own_logprobs(random, batch)
        whole, rows = summarise(batch, own), [row_of(batch, own, row) for row in range(batch.num_rows)]
        sums = [slow_differences(batch, own, row) for row in range(batch.num_rows)]
        live, every = [sum(one) for one in sums if one], list(itertools.chain(*sums))
        assert whole.rejected == Counter(reason for reason in batch.reject_reason if reason)
        flags = {flag.name: sum(bool(mine & flag) for mine in batch.flags.tolist()) for flag in Flag}
        assert whole.flagged == {name: count for name, count in flags.items() if count}
        for name in ("peer_tokens", "dropped_tokens", "bytes", "spans", "one_to_one_bytes", "receiver_tokens"):
            assert getattr(whole, name) == sum(getattr(row, name) for row in rows), name
        assert close(whole.peer_nats, float(batch.span_logprob.sum()) + whole.dropped_nats)
        assert close(whole.aligned_nats, float(batch.span_logprob.sum()))
        assert close(sum(row.aligned_nats for row in rows), whole.aligned_nats)
        assert whole.receiver_tokens == sum(whole.tokens_of_kind.values())
        for name in SPAN_KINDS:
            wide = [
                slow_kind(*pair) == name
                for pair in zip(batch.span_peer_tokens, batch.span_receiver_tokens, strict=True)
            ]
            assert whole.tokens_of_kind[name] == batch.span_receiver_tokens[wide].sum()
        assert close(whole.gap_nats, sum(live))
        assert close(whole.gap_nats_per_byte * whole.bytes, whole.gap_nats)
        assert close(whole.gap_nats_per_token * whole.receiver_tokens, whole.gap_nats)
        assert close(whole.length_ratio, whole.receiver_tokens / whole.peer_tokens)
        assert close(whole.span_std_nats, float(np.std(every)))
        assert close(whole.span_p95_nats, float(np.quantile(np.abs(every), 0.95)))
        outside = sum(row.outside_band * row.spans for row in rows if row.outside_band is not None)
        assert close(whole.outside_band, outside / whole.spans)
        assert close(whole.sequence_ess, slow_ess(live))
        assert close(whole.span_ess, slow_ess(every))


def check_rows_without_a_trace_count_in_no_residual(receivers: Receivers, random: Random) -> None:
    """Bare texts among traced rows change no figure but the number of rows, of rejections and of flags."""
    for kind in KINDS:
        answers = make_batch(random, 8)
        bare = [bare_text(make_text(random).encode(), finished=True) for _ in range(4)]
        alone = translate_batch(answers, receivers[kind], max_tokens=25)
        batch = translate_batch([*answers, *bare], receivers[kind], max_tokens=25)
        own = own_logprobs(random, batch)
        whole, wanted = summarise(batch, own), summarise(alone, own[: len(alone.token_ids)])
        changed = {"rows", "rejected", "flagged"}
        for field in dataclasses.fields(whole):
            if field.name not in changed:
                assert getattr(whole, field.name) == getattr(wanted, field.name), field.name
        assert whole.rows == 12
        assert all(row_of(batch, own, row) == row_of(alone, own, row) for row in range(8))
        assert all(row_of(batch, own, row).gap_nats is None for row in range(8, 12))
        for row in range(8):
            trace = batch.row(row)
            inside = batch.peer_logprobs[batch.peer_offsets[row] : batch.peer_offsets[row + 1]]
            inside = inside[trace.peer_span_of_token >= 0].astype(float)
            assert trace.span_peer_tokens.sum() == len(inside)
            assert close(float(trace.span_logprob.sum()), float(inside.sum()))


def check_effective_share_is_that_of_the_weights(receivers: Receivers, random: Random) -> None:
    """The effective share is (sum w)^2 / (n sum w^2), also for weights far beyond the range of a float; 0 for none."""
    assert effective_share(np.array([])) == 0.0
    for _ in range(20):
        logs = [random.gauss(0, 2) for _ in range(random.randint(1, 9))]
        for shift in (0.0, 5000.0, -5000.0):
            with never_raises(shift):
                assert math.isclose(effective_share(np.array(logs) + shift), slow_ess(logs), rel_tol=1e-6)


def check_card_figures_are_those_of_the_spans(receivers: Receivers, random: Random) -> None:
    """A card's figures, for all ordered pairs of kinds, are those of a walk over the common spans."""
    for name, kind in itertools.permutations(KINDS, 2):
        texts = [make_text(random) for _ in range(3)]
        if name in METASPACE:
            texts = [text.replace("\u2581", "_") for text in texts]
        answers, batch = translated(receivers[name], receivers[kind], texts)
        coverage = coverage_of(batch)
        assert coverage.rows == len(texts)
        widths = batch.span_receiver_tokens.tolist()
        tokens = sum(widths)
        pairs = list(zip(batch.span_peer_tokens.tolist(), widths, strict=True))
        for name_of_kind, share in coverage.share.items():
            mine = sum(width for pair, width in zip(pairs, widths, strict=True) if slow_kind(*pair) == name_of_kind)
            assert close(share, mine / tokens if tokens else 0.0)
        assert coverage.max_tokens_per_span == max(widths, default=0)
        if widths:
            assert close(coverage.tokens_per_span, tokens / len(widths))
            assert close(coverage.bytes_per_span, coverage.bytes / len(widths))
            assert coverage.p99_tokens_per_span == int(np.quantile(widths, 0.99))
        assert sum(coverage.rejected.values()) == sum(map(bool, batch.reject_reason))
        assert Flag.TAIL.name not in coverage.flagged
        for row, answer in enumerate(answers):
            expect_drawn(receivers[kind], answer, batch, row)


def expect_drawn(receiver, answer, batch: AlignedBatch, row: int) -> None:
    """Check a card's view of a row: the peer's whole text on one side, the receiver's on the other, span by span."""
    spans = span_texts(answer, batch, row, receiver)
    if batch.flags[row] & Flag.REJECT:
        assert spans == []
        return
    assert b"".join(piece for span in spans for piece in span.peer) == answer.completion
    own = b"".join(piece for span in spans for piece in span.receiver)
    assert own == receiver.completion_bytes(batch.row(row).token_ids)
    assert any(span.is_rewritten for span in spans) == bool(batch.flags[row] & Flag.NORM)
    for span in spans:
        assert all((*span.peer, *span.receiver)), "tokens without bytes are left out"
        assert span.is_rewritten == (b"".join(span.peer) != b"".join(span.receiver))
        assert span.is_one_to_one == (len(span.peer) == len(span.receiver) == 1)
