"""The cost of sharing per pair, from metrics to the page."""

import json
import re

import pytest

from mrl.config.run_folder import RunFolder
from mrl.report.page import write_report
from mrl.report.run_data import RunData, read_run
from mrl.report.sharing_cost import cost_table, gap_chart, pair_costs

FIRST = {
    "align/rows/b": 4.0,
    "align/rejected_share/b": 0.25,
    "align/rejected/bytes_differ/b": 1.0,
    "align/flagged/norm/b": 2.0,
    "align/trace_rejected/logprobs/b": 1.0,
    "align/sequence_ess/b": 0.5,
    "align/receiver_tokens/b": 10.0,
    "align/length_ratio/b": 2.0,
    "align/one_to_one_tokens/b": 0.5,
    "align/bytes/b": 30.0,
    "align/spans/b": 8.0,
    "align/gap_nats_per_byte/b": -0.5,
    "align/span_std_nats/b": 0.3,
    "align/rejected": 1.0,
}
SECOND = {
    "align/rows/b": 1.0,
    "align/rejected_share/b": 0.0,
    "align/receiver_tokens/b": 30.0,
    "align/length_ratio/b": 1.0,
    "align/one_to_one_tokens/b": 0.9,
    "align/one_to_one_bytes/b": 0.7,
    "align/sequence_ess/b": 1.0,
    "align/bytes/b": 90.0,
    "align/spans/b": 24.0,
    "align/gap_nats_per_byte/b": -0.1,
    "align/span_std_nats/b": 0.5,
}


@pytest.fixture
def data() -> RunData:
    return RunData("run", {}, ["a", "b"], [], steps={"a": {1: FIRST, 2: {"align/rejected": 0.0}, 3: SECOND}, "b": {}})


def test_steps_are_weighted_by_what_they_moved(data):
    """Tokens weigh shares of tokens, bytes the gap, spans variances, and lengths add up on both sides."""
    (cost,) = pair_costs(data)
    assert (cost.source, cost.receiver, cost.answers, cost.rejected) == ("b", "a", 5.0, 1.0)
    assert dict(cost.reasons) == {"bytes_differ": 1}
    assert dict(cost.flags) == {"norm": 2}
    assert cost.mean("one_to_one_tokens") == pytest.approx((5 + 27) / 40)
    assert cost.tokens == 40
    assert cost.mean("sequence_ess") == pytest.approx((4 * 0.5 + 1.0) / 5)
    assert cost.mean("length_ratio") == pytest.approx(40 / 35)
    assert cost.mean("gap_nats_per_byte") == pytest.approx((-15 - 9) / 120)
    assert cost.span_std_nats == pytest.approx(((8 * 0.09 + 24 * 0.25) / 32) ** 0.5)
    assert cost.mean("outside_band") is None


def test_table_shows_the_pair(data):
    """One row with the numbers of the whole run, and what was rejected why."""
    table = cost_table(data)
    for words in (
        ">5<",
        ">20%<",
        ">80%<",
        ">1.14<",
        ">-0.200<",
        ">0.46<",
        ">70%<",
        ">60%<",
        "1 rejected: bytes_differ, 1 without trace: logprobs, 2 norm",
    ):
        assert words in table


def test_nothing_is_shown_where_nothing_was_shared(data):
    """A run without peers has no such table and no empty chart."""
    data.steps = {"a": {1: {"reward/mean": 0.5, "align/rows/b": 0.0}}}
    assert cost_table(data) == ""
    assert gap_chart(data).drawing == ""


def test_page_holds_the_cost_of_every_pair(make_run):
    """The report of a run with peers shows both directions and the gap over steps."""
    page = write_report(make_run(steps=60)).read_text()
    assert page.count("Cost of sharing per pair") == 1
    assert "How unlikely peers&#x27; answers are" in page


@pytest.mark.parametrize(
    ("floors", "cells"),
    [
        ({}, ("-", "-")),
        ({("b", "a"): None}, ("not measurable", "-")),
        ({("a", "b"): 0.1}, ("-", "-")),
        ({("b", "a"): 0.28}, ("0.28", "0.36")),
        ({("b", "a"): 0.9}, ("0.90", "0.00")),
    ],
)
def test_span_std_stands_beside_its_floor(data, floors, cells):
    """sqrt(0.457^2 - 0.28^2) = 0.361; a floor above what was seen leaves nothing, one of the other way is not taken."""
    data.floors = floors
    found = re.findall(r'class="n">([^<]*)</td>', cost_table(data))
    assert tuple(found[8:11]) == ("0.46", *cells)


def test_floors_are_read_from_pair_cards(make_run):
    """Both directions; one tokenizer for both has none to pay; what is no card is named and the rest is shown."""
    run = RunFolder(make_run(steps=20))
    run.pair_cards.mkdir()
    measured = [
        {"peer": "qwen", "receiver": "llama", "floor": {"span_std_nats": 0.25}},
        {"peer": "llama", "receiver": "qwen", "floor": {"not_measurable": "joins words"}},
    ]
    cards = {
        "one": {"names": ["qwen", "llama"], "fingerprints": ["f", "g"], "directions": measured},
        "two": {"names": ["a", "b"], "fingerprints": ["f", "f"], "directions": []},
        "three": {"names": ["c", "d"], "fingerprints": ["", ""], "directions": []},
        "four": ["no card"],
    }
    for name, card in cards.items():
        (run.pair_cards / f"{name}.json").write_text(json.dumps(card))
    data = read_run(run.path)
    same = {("a", "b"): 0.0, ("b", "a"): 0.0}
    assert data.floors == {("qwen", "llama"): 0.25, ("llama", "qwen"): None} | same
    assert [problem.split()[0] for problem in data.problems] == ["four.json"]
    assert "not measurable" in write_report(run.path).read_text()
