"""The residual report, against its definitions computed one row at a time."""

import dataclasses

import numpy as np
import pytest

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.pair_card import written_by
from mrl.alignment.peer_answer import PeerAnswer, bare_text
from mrl.alignment.receiver import Receiver
from mrl.alignment.residual import KINDS, Residual, effective_share, excess_std_nats, summarise
from mrl.alignment.selection import select_rows
from mrl.alignment.translate import translate_batch
from mrl.records.finish import FinishReason

TEXTS = ["reverse: yah 12 + 34", "def f(x): return x\n", "a\u2581b", "na\u00efve caf\u00e9 \U0001f469", "hay"]


@pytest.fixture(scope="module")
def receivers(receiver_of) -> tuple[Receiver, Receiver]:
    return receiver_of("byte_level"), receiver_of("metaspace")


def answers_of(peer: Receiver, rng: np.random.Generator) -> list[PeerAnswer]:
    """The texts with made-up log-probs; the first is finished."""
    plain = written_by(peer, TEXTS)
    made = [dataclasses.replace(a, logprobs=-rng.random(a.special.size).astype(np.float32)) for a in plain]
    first = made[0]
    made[0] = dataclasses.replace(
        first,
        finish_reason=FinishReason.STOP,
        byte_lengths=np.append(first.byte_lengths, np.int32(0)),
        logprobs=np.append(first.logprobs, np.float32(-0.25)),
        special=np.append(first.special, True),
        token_ids=None,
    )
    return made


@pytest.fixture
def batch(receivers) -> AlignedBatch:
    peer, receiver = receivers
    return translate_batch(answers_of(peer, np.random.default_rng(0)), receiver, max_tokens=1000)


@pytest.fixture
def logprobs(batch) -> np.ndarray:
    return -np.random.default_rng(1).random(batch.token_ids.size)


@pytest.fixture
def rows(batch, logprobs) -> list[Residual]:
    """The report of each row as a batch of its own."""
    parts = np.split(logprobs, batch.row_offsets[1:-1])
    return [summarise(select_rows(batch, [row]), part) for row, part in enumerate(parts)]


def test_counts_follow_the_spans(batch, rows):
    """Kinds, tokens and bytes of every row are those that a walk over its spans finds."""
    for row, found in enumerate(rows):
        mine = batch.span_row == row
        spans = list(zip(batch.span_peer_tokens[mine], batch.span_receiver_tokens[mine], strict=True))
        kinds = [KINDS[(r > 1) + 2 * (p > 1)] for p, r in spans]
        for kind in KINDS:
            assert found.tokens_of_kind[kind] == sum(r for (_, r), k in zip(spans, kinds, strict=True) if k == kind)
        sizes = zip(batch.span_bytes[mine], kinds, strict=True)
        assert found.one_to_one_bytes == sum(size for size, kind in sizes if kind == "one_to_one")
        assert found.receiver_tokens == sum(r for _, r in spans)
        assert found.bytes == (len(TEXTS[row].encode()) if spans else 0)


def test_gap_is_own_minus_peer(batch, logprobs, rows):
    """The gap of a row is the sum of own log-probs minus those of the peer that were carried over."""
    for row, found in enumerate(rows):
        own = logprobs[batch.row_offsets[row] : batch.row_offsets[row + 1]]
        if batch.reject_reason[row]:
            assert found.gap_nats is None
        else:
            carried = batch.peer_logprob[row] - batch.dropped_logprob[row]
            assert found.gap_nats == pytest.approx(own.sum() - carried, abs=1e-6)


def test_rows_sum_to_the_batch(batch, logprobs, rows):
    """The report of the batch is the sum of those of its rows, and nothing that was given is missing."""
    whole, known = summarise(batch, logprobs), [row for row in rows if row.gap_nats is not None]
    assert whole.gap_nats == pytest.approx(sum(row.gap_nats for row in known))
    for name in ("receiver_tokens", "peer_tokens", "dropped_tokens", "bytes", "spans"):
        assert getattr(whole, name) == sum(getattr(row, name) for row in rows)
    assert whole.peer_tokens + whole.dropped_tokens == batch.peer_span_of_token.size
    assert sum(whole.tokens_of_kind.values()) == whole.receiver_tokens
    assert sum(whole.share_of(kind) for kind in KINDS) == pytest.approx(1.0)
    assert whole.peer_nats == pytest.approx(batch.span_logprob.sum() + whole.dropped_nats)
    assert whole.gap_nats_per_byte == pytest.approx(whole.gap_nats / whole.bytes)
    assert whole.gap_nats_per_token == pytest.approx(whole.gap_nats / whole.receiver_tokens)
    assert whole.outside_band == pytest.approx(sum(row.outside_band * row.spans for row in known) / whole.spans)


def test_rejected_rows_are_counted_with_their_reason(batch):
    """The literal metaspace mark cannot be expressed: one row, all its log-prob dropped."""
    whole = summarise(batch)
    assert whole.rejected == {"bytes_differ": 1}
    assert whole.flagged["REJECT"] == 1
    assert whole.dropped_nats == pytest.approx(batch.peer_logprob[2])
    assert whole.gap_nats is None


def test_identity_has_no_residual(receivers):
    """The same tokenizer and the same log-probs: all 1:1, gap 0, weights all equal."""
    peer, _ = receivers
    answers = answers_of(peer, np.random.default_rng(2))[1:]
    batch = translate_batch(answers, peer, max_tokens=1000)
    whole = summarise(batch, np.concatenate([answer.logprobs for answer in answers]))
    assert whole.share_of("one_to_one") == whole.one_to_one_byte_share == whole.length_ratio == 1.0
    assert whole.gap_nats == pytest.approx(0.0, abs=1e-6)
    assert whole.span_std_nats == pytest.approx(0.0, abs=1e-7)
    assert whole.sequence_ess == pytest.approx(1.0)
    assert whole.outside_band == 0.0


def test_effective_share():
    """One weight that dwarfs the others leaves one sample; huge logs do not overflow."""
    assert effective_share(np.array([1000.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_share(np.array([-5000.0, -5000.0])) == pytest.approx(1.0)
    weights = np.array([1.0, 2.0, 3.0])
    assert effective_share(np.log(weights)) == pytest.approx(36 / 14 / 3)
    assert effective_share(np.array([])) == 0.0


def test_sequence_ess_counts_translated_rows_only(receivers, batch):
    """A rejected row carries no weight, not a weight of one."""
    answers = answers_of(receivers[0], np.random.default_rng(0))
    kept = [answer for answer, reason in zip(answers, batch.reject_reason, strict=True) if not reason]
    without = translate_batch(kept, receivers[1], max_tokens=1000)
    logprobs = -np.random.default_rng(1).random(batch.token_ids.size)
    assert summarise(batch, logprobs).sequence_ess == pytest.approx(summarise(without, logprobs).sequence_ess)


def test_floor_is_taken_off():
    """Variances subtract; a floor above the measured spread leaves 0."""
    assert excess_std_nats(0.7, 0.0) == pytest.approx(0.7)
    assert excess_std_nats(0.7, 1.7) == 0.0


def test_empty_batch(receivers):
    """No rows, no division by zero."""
    whole = summarise(translate_batch([], receivers[1], max_tokens=10), np.zeros(0))
    assert (whole.rows, whole.rejected, whole.length_ratio, whole.gap_nats) == (0, {}, 0.0, None)


def test_only_nats_in_spans_are_divided(batch, rows):
    """What was dropped, and rejected rows, add nothing to the nats in spans."""
    whole = summarise(batch)
    assert whole.dropped_nats < 0
    assert whole.aligned_nats == pytest.approx(batch.span_logprob.sum())
    for row, found in enumerate(rows):
        assert found.aligned_nats == pytest.approx(batch.span_logprob[batch.span_row == row].sum(), abs=1e-12)


def test_rows_without_a_trace_change_no_figure(receivers):
    """Bare texts are rows, and flagged; nothing that compares with a peer's tokens or log-probs counts them."""
    peer, receiver = receivers
    traced = answers_of(peer, np.random.default_rng(0))
    bare = [bare_text(text.encode(), finished=True) for text in ("sun nus", "a\u2581b")]
    batch = translate_batch([bare[0], *traced, bare[1]], receiver, max_tokens=1000)
    alone = translate_batch(traced, receiver, max_tokens=1000)
    own = -np.random.default_rng(1).random(batch.token_ids.size)
    first, last = batch.row_offsets[[1, -2]]
    mixed, whole = summarise(batch, own), summarise(alone, own[first:last])
    counted = {"rows": 7, "rejected": {"bytes_differ": 2}, "flagged": mixed.flagged}
    assert mixed == dataclasses.replace(whole, **counted)
    assert mixed.flagged == whole.flagged | {"UNTRACED": 2, "REJECT": 2}
    assert batch.row(0).token_ids.size > 0
    assert summarise(translate_batch(bare, receiver, max_tokens=99), np.zeros(first)).gap_nats is None
