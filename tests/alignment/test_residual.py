"""The residual report, against its definitions computed one row at a time."""

import dataclasses

import numpy as np
import pytest

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.pair_card import written_by
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.receiver import Receiver
from mrl.alignment.residual import excess_std_nats, summarise
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


def test_floor_is_taken_off():
    """Variances subtract; a floor above the measured spread leaves 0."""
    assert excess_std_nats(0.7, 0.0) == pytest.approx(0.7)
    assert excess_std_nats(0.7, 1.7) == 0.0


def test_empty_batch(receivers):
    """No rows, no division by zero."""
    whole = summarise(translate_batch([], receivers[1], max_tokens=10), np.zeros(0))
    assert (whole.rows, whole.rejected, whole.length_ratio, whole.gap_nats) == (0, {}, 0.0, None)
