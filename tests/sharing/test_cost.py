"""What sharing costs per peer: alignment with own tokens, and the gap once own log-probs are known."""

import numpy as np
import pytest

from mrl.alignment.residual import KINDS
from mrl.metrics.names import is_known
from mrl.sharing.carried import carry
from mrl.sharing.cost import GAPS, SharedRows, Tried, gap_values, shared_values, tried_values
from tests.support.retokenizing import retokenize

TEXT = b"reverse: yah"


@pytest.fixture
def shared(make, peer, receiver):
    """One answer of the peer, -0.5 nats a token, trained on as example 3."""
    record = make.rollout(make.sampled(peer, [1.0], texts=[TEXT]), peer).record
    carried = carry(record.answers, [record.fingerprint], receiver, max_tokens=64)
    return [SharedRows("peer", (3,), carried.batch)]


def test_residual_of_a_shared_answer(receiver, shared):
    """Coverage counts own tokens, and the gap is own minus peer log-prob over the same text, EOS included."""
    own_ids = retokenize(receiver, TEXT, finished=True, max_tokens=64).token_ids
    values = shared_values(shared)
    assert values["align/receiver_tokens/peer"] == own_ids.size
    shares = [values[f"align/{kind}_tokens/peer"] for kind in KINDS]
    assert sum(shares) == pytest.approx(1)
    assert (shares[0] < 1) == (shares[2] > 0) == (own_ids.size < len(TEXT) + 1)
    assert values["align/length_ratio/peer"] == pytest.approx(own_ids.size / (len(TEXT) + 1))
    assert values["align/bytes/peer"] == len(TEXT)
    assert values["align/spans/peer"] == own_ids.size
    assert values["align/peer_nats_per_byte/peer"] == pytest.approx(-0.5 * (len(TEXT) + 1) / len(TEXT))
    assert values["align/dropped_nats/peer"] == 0
    gaps = gap_values(shared, {3: np.full(own_ids.size, -0.25, np.float32)})
    expected = -0.25 * own_ids.size + 0.5 * (len(TEXT) + 1)
    assert gaps["align/gap_nats_per_byte/peer"] == pytest.approx(expected / len(TEXT))
    assert set(gaps) == {f"align/{name}/peer" for name in GAPS}
    assert all(map(is_known, values | gaps))


def test_gap_waits_for_log_probs_of_the_very_tokens(shared):
    """Without log-probs, or with those of another number of tokens, there is no gap rather than a wrong one."""
    assert gap_values(shared, {}) == {}
    assert gap_values(shared, {3: np.zeros(1, np.float32)}) == {}


def test_answers_looked_at_are_counted_per_peer_and_reason():
    """Rejected texts and disbelieved traces are two things."""
    values = tried_values(
        [
            Tried("peer", ""),
            Tried("peer", "utf8"),
            Tried("peer", "", "logprobs"),
            Tried("other", "untraced", "untraced"),
        ]
    )
    assert values == {
        "align/rows/peer": 3.0,
        "align/rejected_share/peer": pytest.approx(1 / 3),
        "align/rejected/utf8/peer": 1.0,
        "align/trace_rejected/logprobs/peer": 1.0,
        "align/rows/other": 1.0,
        "align/rejected_share/other": 1.0,
        "align/rejected/untraced/other": 1.0,
        "align/trace_rejected/untraced/other": 1.0,
    }
    assert all(map(is_known, values))
    assert tried_values([]) == {}


def test_sgt_reports_the_cost_of_every_rescue(make_sgt, make, peer, step_of):
    """The regime names the place of each rescue among its examples, so that the learner can add its log-probs."""
    answer = make.rollout(make.sampled(peer, [1.0], texts=[TEXT]), peer).record.answers[0]
    told = make.success(TEXT, trace=answer.trace, fingerprint=peer.fingerprint)
    absorbed = step_of(make_sgt(), [make.group([0.0, 0.0]), make.group([1.0, 0.0], "q")], [told])
    (rows,) = absorbed.shared
    (place,) = rows.places
    example = absorbed.examples[place]
    assert example.component == "rescue"
    assert rows.batch.token_ids.tolist() == example.answer_token_ids.tolist()
    assert absorbed.counts["align/rows/peer"] == 1.0
    assert absorbed.counts["align/one_to_one_tokens/peer"] < 1.0


def test_sgt_publishes_the_trace(make_sgt, make, receiver):
    """A published success carries how the own tokenizer cut it."""
    group = make.sampled(receiver, [1.0], texts=[TEXT])
    (record,) = make_sgt().publish(group, make.author())
    assert len(record.trace.special) == retokenize(receiver, TEXT, finished=True, max_tokens=64).token_ids.size
