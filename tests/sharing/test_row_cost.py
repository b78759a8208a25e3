"""One line for every answer of a peer that was looked at, with the figures of its own row."""

import math

import numpy as np
import pytest
from msgspec import structs

from mrl.alignment.residual import summarise
from mrl.records.codec import decode, encode
from mrl.records.experience import Received
from mrl.records.telemetry_messages import ResidualsRecord, RowResidual, telemetry_decoder
from mrl.sharing.row_cost import row_residuals_of

TEXTS = [b"reverse: yah", b"copy: hay"]


@pytest.fixture
def absorbed(build, make, peer, step_of):
    """One answer of a peer that cannot be expressed, and two behind it that are trained on."""
    theirs = make.rollout(make.sampled(peer, [0, 1, 0], texts=[b"x", *TEXTS]), peer)
    broken = structs.replace(theirs.record.answers[0], completion=b"\xff", trace=None)
    record = structs.replace(theirs.record, answers=[broken, *theirs.record.answers[1:]])
    return step_of(build("prp"), [make.group([1, 0])], [Received(record, 0)])


def own_logprobs(absorbed, value=-1.0):
    """Place -> the same own log-prob at every token of a row."""
    return {
        place: np.full(row.answer_token_ids.size, value * (1 + place), np.float32)
        for place, row in enumerate(absorbed.examples)
    }


def test_every_answer_has_a_line(absorbed):
    """Trained ones with figures, the rejected one with its reason; each says which answer of which record it is."""
    lines = row_residuals_of(absorbed.tried, absorbed.shared, own_logprobs(absorbed))
    assert [(line.source, line.prompt_id, line.record_id, line.answer, line.trained) for line in lines] == [
        ("peer", "p", "id0", 1, True),
        ("peer", "p", "id0", 2, True),
        ("peer", "p", "id0", 0, False),
    ]
    assert [line.rejected for line in lines] == ["", "", "utf8"]
    assert [line.trace_fault for line in lines] == ["", "", "untraced"]
    assert lines[2].gap_nats is lines[2].own_tokens is lines[2].ess_weight is None


def test_figures_are_those_of_the_row(absorbed, receiver):
    """Coverage, lengths and gap of each row, as written; the weights of a step sum to 1."""
    own = own_logprobs(absorbed)
    lines = row_residuals_of(absorbed.tried, absorbed.shared, own)[:2]
    (rows,) = absorbed.shared
    gaps = []
    for line, text, place in zip(lines, TEXTS, rows.places, strict=True):
        ids = absorbed.examples[place].answer_token_ids
        assert line.flags == []
        assert (line.own_tokens, line.peer_tokens, line.bytes) == (ids.size, len(text) + 1, len(text))
        assert line.spans == ids.size  # the peer cut every byte
        widths = receiver.byte_lengths(ids, np.array([0, ids.size]))
        assert line.one_to_one_tokens == pytest.approx((widths <= 1).mean())
        assert line.one_to_one_bytes == pytest.approx((widths == 1).sum() / len(text))
        assert line.length_ratio == pytest.approx(ids.size / (len(text) + 1))
        wide = int((widths > 1).sum())  # one own token, several of the peer's
        assert line.spans_of_kind == [ids.size - wide, 0, wide, 0]
        assert (line.max_tokens_per_span, line.dropped_nats) == (1, 0)
        assert line.peer_nats == pytest.approx(-0.5 * (len(text) + 1), rel=1e-5)
        gaps.append(float(own[place].sum()) + 0.5 * (len(text) + 1))
        assert line.gap_nats == pytest.approx(gaps[-1], rel=1e-5)
        assert line.gap_nats_per_byte == pytest.approx(gaps[-1] / len(text), rel=1e-5)
        assert line.gap_nats_per_token == pytest.approx(gaps[-1] / ids.size, rel=1e-5)
        ratios = own[place] + 0.5 * np.maximum(widths, 1)
        assert line.span_std_nats == pytest.approx(ratios.std(), rel=1e-5)
        assert line.span_p95_nats == pytest.approx(np.quantile(np.abs(ratios), 0.95), rel=1e-5)
        assert line.outside_band == pytest.approx(np.mean((ratios < math.log(0.8)) | (ratios > math.log(1.2))))
    weights = np.exp(np.array(gaps) - max(gaps))
    assert [line.ess_weight for line in lines] == pytest.approx((weights / weights.sum()).tolist(), rel=1e-4)
    ess = summarise(rows.batch, np.concatenate([own[place] for place in rows.places])).sequence_ess
    assert 1 / (2 * sum(line.ess_weight**2 for line in lines)) == pytest.approx(ess, rel=1e-5)


def test_what_is_not_known_is_absent(make_sgt, make, receiver, step_of):
    """An answer without a trace has its length and flags and no figure against the peer; so before training."""
    absorbed = step_of(make_sgt(), [make.group([0, 0])], [make.success()])
    (line,) = row_residuals_of(absorbed.tried, absorbed.shared, own_logprobs(absorbed))
    assert (line.trained, line.flags, line.bytes) == (True, ["UNTRACED"], len(TEXTS[0]))
    assert line.trace_fault == "untraced"
    assert line.peer_tokens is line.length_ratio is line.gap_nats is line.ess_weight is None


def test_without_own_log_probs_there_is_coverage_only(absorbed):
    """What was not trained on in the very tokens it was aligned in is not compared."""
    lines = row_residuals_of(absorbed.tried, absorbed.shared, {})
    assert [line.gap_nats for line in lines] == [None] * 3
    assert lines[0].one_to_one_tokens is not None
    short = {place: values[:-1] for place, values in own_logprobs(absorbed).items()}
    assert row_residuals_of(absorbed.tried, absorbed.shared, short) == lines


@pytest.mark.parametrize("name", ["hacpo", "graft", "prp"])
def test_regimes_name_the_answers_that_they_train_on(build, make, peer, step_of, name):
    """Rows and answers belong together, also where a regime takes some of a group only or cuts ends off."""
    own = [make.sampled(peer, [0, 0], "p"), make.sampled(peer, [1, 0], "q")]
    heard = [
        make.rollout(make.sampled(peer, [1, 0], "p", texts=[b"aa", b"bbbb"]), peer),
        make.rollout(make.sampled(peer, [0, 0], "q", texts=[b"c", b"ddd"]), peer),
    ]
    absorbed = step_of(build(name), own, heard)
    texts = {("p", 0): 2, ("p", 1): 4, ("q", 0): 1, ("q", 1): 3}
    lines = [line for line in row_residuals_of(absorbed.tried, absorbed.shared, {}) if line.trained]
    assert lines
    assert [line.bytes for line in lines] == [texts[line.prompt_id, line.answer] for line in lines]
    for rows in absorbed.shared:
        told = [absorbed.examples[place].prompt_id for place in rows.places]
        assert told == [one.prompt_id for one in rows.answers]


def test_a_line_survives_the_wire():
    """The record that carries lines is one that the supervisor decodes."""
    line = RowResidual(source="a", prompt_id="p", record_id="r", answer=1, trained=False, rejected="utf8")
    record = ResidualsRecord(role="learner/b", policy="b", step=3, rows=[line])
    assert decode(encode(record), telemetry_decoder) == record
