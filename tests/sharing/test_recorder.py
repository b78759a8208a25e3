"""What sharing cost: metrics per peer."""

import math
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from mrl.alignment.residual import KINDS, summarise
from mrl.metrics.names import is_known
from mrl.records.experience import Received
from mrl.sharing.peer_traces import peer_traces
from mrl.sharing.recorder import GAPS, SharingRecorder, examined_values
from mrl.sharing.regime import ExaminedAnswer
from tests.support.retokenizing import retokenize

TEXTS = [b"reverse: yah", b"copy: hay"]
PROMPT = np.array([1, 2, 3], np.int32)


@pytest.fixture
def step(build, make, peer, step_of):
    """A regime and its step: one answer of a peer that cannot be expressed, and two behind it that are trained on."""
    theirs = make.rollout(make.sampled(peer, [0, 1, 0], texts=[b"x", *TEXTS]), peer)
    broken = structs.replace(theirs.record.answers[0], completion=b"\xff", trace=None)
    told = structs.replace(theirs.record, answers=[broken, *theirs.record.answers[1:]])
    regime = build("prp")
    return regime, step_of(regime, [make.group([1, 0])], [Received(told, 0)])


@pytest.fixture
def read(make, make_context, peer):
    """Traces of answers of the peer, -0.5 nats a token, and the recorder that heard of them."""

    def read(texts=TEXTS, *, source="peer"):
        context = make_context()
        told = make.rollout(make.sampled(peer, [1.0] * len(texts), texts=texts), peer, source=source).record
        return peer_traces([told], context, needs_trace=True)[0], context.recorder

    return read


def own_logprobs(absorbed, value=-1.0):
    """Place -> the same own log-prob at every token of a row."""
    return {
        place: np.full(row.answer_token_ids.size, value * (1 + place), np.float32)
        for place, row in enumerate(absorbed.examples)
    }


def test_metrics_of_a_trained_answer(receiver, read):
    """Coverage counts own tokens, and the gap is own minus peer log-prob over the same text, EOS included."""
    ((trace,), recorder), text = read(TEXTS[:1]), TEXTS[0]
    own_ids = retokenize(receiver, text, finished=True, max_tokens=64).token_ids
    values = recorder.record([trace.example(PROMPT, component="c")], {0: np.full(own_ids.size, -0.25, np.float32)})
    assert values["align/rows/peer"] == 1
    assert values["align/receiver_tokens/peer"] == own_ids.size
    shares = [values[f"align/{kind}_tokens/peer"] for kind in KINDS]
    assert sum(shares) == pytest.approx(1)
    assert (shares[0] < 1) == (shares[2] > 0) == (own_ids.size < len(text) + 1)
    assert values["align/length_ratio/peer"] == pytest.approx(own_ids.size / (len(text) + 1))
    assert values["align/bytes/peer"] == len(text)
    assert values["align/spans/peer"] == own_ids.size
    assert values["align/peer_nats_per_byte/peer"] == pytest.approx(-0.5 * (len(text) + 1) / len(text))
    assert values["align/dropped_nats/peer"] == 0
    expected = -0.25 * own_ids.size + 0.5 * (len(text) + 1)
    assert values["align/gap_nats_per_byte/peer"] == pytest.approx(expected / len(text))
    assert {f"align/{name}/peer" for name in GAPS} <= values.keys()
    assert all(map(is_known, values))


def test_a_step_is_recorded_once(read):
    """What was examined before a record is in that record alone."""
    (_, recorder) = read()
    assert recorder.record([], {})["align/rows/peer"] == 2
    assert recorder.record([], {}) == {}


def test_without_own_log_probs_there_is_coverage_only(step, record):
    """A step whose rows nobody scored has no gap rather than a wrong one."""
    regime, absorbed = step
    values = record(regime, absorbed)
    assert values["align/receiver_tokens/peer"] > 0
    assert not any(f"align/{name}/peer" in values for name in GAPS)


def test_tokens_other_than_the_aligned_ones_are_not_compared(read):
    """Own log-probs are those of the training example: of other tokens than the peer's text they say nothing."""
    (trace, other), recorder = read()
    examples = [one.example(PROMPT, component="c") for one in (trace, other)]
    examples[0] = replace(examples[0], answer_token_ids=examples[0].answer_token_ids + 1)
    logprobs = {place: np.full(row.answer_token_ids.size, -1, np.float32) for place, row in enumerate(examples)}
    values = recorder.record(examples, logprobs)
    assert values["align/receiver_tokens/peer"] == trace.num_tokens + other.num_tokens
    gap_nats = -other.num_tokens + 0.5 * (len(TEXTS[1]) + 1)
    assert values["align/gap_nats_per_byte/peer"] == pytest.approx(gap_nats / len(TEXTS[1]))


def test_a_row_is_measured_as_far_as_it_was_trained(read):
    """A regime that cuts a row between two spans is measured up to there."""
    (fine, coarse), recorder = read([b"zzzz", b"reverse: yah"])
    sizes = [2, coarse.num_tokens]
    examples = [
        one.example(PROMPT, component="c", kept=np.arange(one.num_tokens) < n)
        for one, n in zip((fine, coarse), sizes, strict=True)
    ]
    logprobs = {place: np.full(size, -1, np.float32) for place, size in enumerate(sizes)}
    values = recorder.record(examples, logprobs)
    assert values["align/receiver_tokens/peer"] == sum(sizes)
    assert values["align/bytes/peer"] == 2 + len(b"reverse: yah")
    assert values["align/dropped_nats/peer"] == -0.5 * 3
    gap_nats = -sum(sizes) + 0.5 * (2 + len(b"reverse: yah") + 1)
    assert values["align/gap_nats_per_byte/peer"] == pytest.approx(gap_nats / values["align/bytes/peer"])


def test_a_row_cut_inside_a_span_does_not_end_the_run(make, make_context, receiver):
    """Its coverage is that of the whole answer, and it has no gap."""
    peer_group = make.sampled(receiver, [1.0], texts=[b"reverse: yah"])
    context = make_context()
    told = make.rollout(peer_group, receiver).record
    lengths = np.frombuffer(told.answers[0].trace.byte_lengths, "<i4")
    one_token = structs.replace(
        told.answers[0].trace,
        byte_lengths=np.array([lengths.sum(), 0], "<i4").tobytes(),
        logprobs=np.array([-1, -1], "<f4").tobytes(),
        special=b"\0\1",
        token_ids=None,
    )
    coarse = structs.replace(told, answers=[structs.replace(told.answers[0], trace=one_token)], fingerprint="f")
    ((trace,),) = peer_traces([coarse], context, needs_trace=True)
    assert trace.num_tokens > 2
    example = trace.example(PROMPT, component="c", kept=np.arange(trace.num_tokens) < 1)
    source = example.source
    values = context.recorder.record([example], {0: np.array([-1], np.float32)})
    assert values[f"align/receiver_tokens/{source}"] == trace.num_tokens
    assert not any(f"align/{name}/{source}" in values for name in GAPS)


def test_an_answer_behind_two_rows_counts_once(read):
    """The first of its rows is the one that is measured."""
    (trace, _), recorder = read()
    examples = [trace.example(PROMPT, component="c"), trace.example(PROMPT, component="d")]
    logprobs = {place: np.full(trace.num_tokens, -1 - place, np.float32) for place in (0, 1)}
    values = recorder.record(examples, logprobs)
    assert values["align/receiver_tokens/peer"] == trace.num_tokens
    gap_nats = -trace.num_tokens + 0.5 * (len(TEXTS[0]) + 1)
    assert values["align/gap_nats_per_byte/peer"] == pytest.approx(gap_nats / len(TEXTS[0]))


def test_rows_of_several_batches_and_sources_come_together(make, make_context, peer):
    """Per peer, whatever the order of training; the figures are those of all its answers, however they were read."""
    told = [("b", TEXTS[0]), ("b", TEXTS[1]), ("a", b"z")]
    records = [make.rollout(make.sampled(peer, [1.0], texts=[text]), peer, source=name).record for name, text in told]
    apart, together = make_context(), make_context()
    by_setting = [
        (apart, [peer_traces([record], apart, needs_trace=True)[0][0] for record in records]),
        (together, [trace for (trace,) in peer_traces(records, together, needs_trace=True)]),
    ]
    found = []
    for context, (first, second, third) in by_setting:
        examples = [trace.example(PROMPT, component="c") for trace in (second, third, first)]
        sizes = [row.answer_token_ids.size for row in examples]
        logprobs = {place: np.linspace(-1, -2, size).astype(np.float32) for place, size in enumerate(sizes)}
        values = context.recorder.record(examples, logprobs)
        assert (values["align/bytes/a"], values["align/bytes/b"]) == (1, sum(map(len, TEXTS)))
        found.append(values)
    assert found[0] == found[1]


def test_answers_looked_at_are_counted_per_peer_and_reason():
    """Rejected texts and disbelieved traces are two things."""

    def looked_at(source, rejected, fault=""):
        return ExaminedAnswer(source, "p", rejected, fault)

    answers = [looked_at("peer", ""), looked_at("peer", "utf8"), looked_at("peer", "", "logprobs")]
    values = examined_values([*answers, looked_at("other", "untraced", "untraced")])
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
    assert SharingRecorder().record([], {}) == {}


def test_every_answer_that_was_looked_at_counts(step, record):
    """The rejected one with its reason, and the two that are trained on with their figures."""
    regime, absorbed = step
    values = record(regime, absorbed, own_logprobs(absorbed))
    assert values["align/rows/peer"] == 3
    assert values["align/rejected/utf8/peer"] == values["align/trace_rejected/untraced/peer"] == 1
    assert values["align/bytes/peer"] == sum(map(len, TEXTS))


def test_gaps_are_those_of_all_answers_trained_on(step, record, receiver):
    """Ratios of all spans and of whole answers, each answer with its own log-probs."""
    regime, absorbed = step
    own = own_logprobs(absorbed)
    values = record(regime, absorbed, own)
    places = [place for place, row in enumerate(absorbed.examples) if row.source == "peer"]
    parts = []
    for place in places:
        ids = absorbed.examples[place].answer_token_ids
        widths = receiver.byte_lengths(ids, np.array([0, ids.size]))  # the peer cut every byte
        parts.append(own[place] + 0.5 * np.maximum(widths, 1))
    ratios, gaps = np.concatenate(parts), np.array([part.sum() for part in parts])
    weights = np.exp(gaps - gaps.max())
    wanted = {
        "gap_nats_per_byte": gaps.sum() / sum(map(len, TEXTS)),
        "gap_nats_per_token": gaps.sum() / ratios.size,
        "span_std_nats": ratios.std(),
        "span_p95_nats": np.quantile(np.abs(ratios), 0.95),
        "outside_band": np.mean((ratios < math.log(0.8)) | (ratios > math.log(1.2))),
        "sequence_ess": weights.sum() ** 2 / (weights**2).sum() / weights.size,
    }
    assert {name: values[f"align/{name}/peer"] for name in wanted} == pytest.approx(wanted, rel=1e-5)


def test_what_is_not_known_is_absent(make_sgt, make, step_of, record):
    """An answer without a trace is counted and flagged, and has no figure against the peer."""
    regime = make_sgt()
    absorbed = step_of(regime, [make.group([0, 0])], [make.success()])
    values = record(regime, absorbed, own_logprobs(absorbed))
    assert values["align/rows/peer"] == values["align/flagged/untraced/peer"] == 1
    assert values["align/trace_rejected/untraced/peer"] == 1
    assert values["align/receiver_tokens/peer"] == 0
    assert not any(f"align/{name}/peer" in values for name in GAPS)


@pytest.mark.parametrize("name", ["hacpo", "graft", "prp"])
def test_rows_say_which_answers_they_are_made_of(build, make, peer, step_of, record, name):
    """Also where a regime takes some of a group only or cuts ends off."""
    own = [make.sampled(peer, [0, 0], "p"), make.sampled(peer, [1, 0], "q")]
    heard = [
        make.rollout(make.sampled(peer, [1, 0], "p", texts=[b"aa", b"bbbb"]), peer),
        make.rollout(make.sampled(peer, [0, 0], "q", texts=[b"c", b"ddd"]), peer),
    ]
    regime = build(name)
    absorbed = step_of(regime, own, heard)
    lengths = {"p": {2, 4}, "q": {1, 3}}
    rows = [row for row in absorbed.examples if row.examined is not None]
    assert rows
    answers = [row.examined.batch.row(row.examined.row) for row in rows]
    for row, answer in zip(rows, answers, strict=True):
        assert np.array_equal(row.answer_token_ids, answer.token_ids[: row.answer_token_ids.size])
    sizes = [int(answer.span_bytes.sum()) for answer in answers]
    assert all(size in lengths[row.prompt_id] for row, size in zip(rows, sizes, strict=True))
    assert record(regime, absorbed)["align/bytes/peer"] == sum(sizes)


def test_sgt_shows_the_cost_of_every_rescue(make_sgt, make, peer, step_of, record):
    """The row of a rescue holds the aligned answer, so that own log-probs fit it."""
    answer = make.rollout(make.sampled(peer, [1.0], texts=TEXTS[:1]), peer).record.answers[0]
    told = make.success(TEXTS[0], trace=answer.trace, fingerprint=peer.fingerprint)
    regime = make_sgt()
    absorbed = step_of(regime, [make.group([0.0, 0.0]), make.group([1.0, 0.0], "q")], [told])
    (example,) = (row for row in absorbed.examples if row.component == "rescue")
    batch = example.examined.batch
    assert batch.token_ids.tolist() == example.answer_token_ids.tolist()
    values = record(regime, absorbed, own_logprobs(absorbed))
    assert values["align/rows/peer"] == 1.0
    assert values["align/one_to_one_tokens/peer"] < 1.0
    own = own_logprobs(absorbed)[absorbed.examples.index(example)]
    assert values["align/gap_nats_per_byte/peer"] == summarise(batch, own).gap_nats_per_byte


def test_sgt_publishes_the_trace(make_sgt, make, receiver):
    """A published success carries how the own tokenizer cut it."""
    group = make.sampled(receiver, [1.0], texts=TEXTS[:1])
    (told,) = make_sgt().publish(group, make.author())
    assert len(told.trace.special) == retokenize(receiver, TEXTS[0], finished=True, max_tokens=64).token_ids.size
