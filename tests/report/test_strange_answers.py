"""The strangest answers per pair, from residual files to the page."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.config.run_folder import RunFolder
from mrl.metrics.residuals import ResidualWriter
from mrl.records.telemetry_messages import ResidualsRecord, RowResidual
from mrl.report.page import write_report
from mrl.report.run_data import read_run
from mrl.report.strange_answers import (
    ROWS_PER_PAIR,
    StrangeAnswers,
    strange_answers,
    strange_table,
    strangest,
)


def line(record_id: str, gap: float | None, *, step: int = 1, source: str = "b") -> dict:
    known = {} if gap is None else {"gap_nats_per_byte": gap, "gap_nats": 40 * gap, "ess_weight": 0.25, "bytes": 40}
    return {"step": step, "source": source, "record_id": record_id, "answer": 2, "flags": ["NORM"]} | known


LINES = [line("x0", -0.1), line("x1", -0.9), line("x3", -0.7), line("none", None), line("y", 0.2, source="c")]
LINES += [line("<x2>", -0.5, step=7)]


@pytest.fixture
def found() -> StrangeAnswers:
    return StrangeAnswers(strangest("a", iter(LINES)))


def test_the_most_negative_gaps_come_first(found):
    """A few per pair, those without a figure left out, text from outside escaped."""
    table = strange_table(found)
    assert re.findall(r"<td>([^<]*) #2</td>", table) == ["x1", "x3", "&lt;x2&gt;", "y"]
    assert len(re.findall("b &rarr; a", table)) == ROWS_PER_PAIR
    assert "none #2" not in table


def test_a_weight_is_set_against_the_fair_share_of_its_step(found):
    """0.25 among the three compared of step 1, among the one of step 7, and among the one of the other peer."""
    weights = re.findall(r'class="n">([^<]*)</td><td>norm</td>', strange_table(found))
    assert weights == ["0.75", "0.75", "0.25", "0.25"]


def test_nothing_to_compare_is_no_table():
    """Without figures there is nothing to show."""
    assert strange_table(StrangeAnswers(strangest("a", [line("none", None)]))) == ""


@given(gaps=st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=5), max_size=12))
def test_one_pass_finds_what_sorting_all_would(gaps):
    """Whatever the order of the steps."""
    lines = [line(f"{step}.{n}", gap, step=step) for step, of in enumerate(gaps) for n, gap in enumerate(of)]
    told = [(one.line["gap_nats_per_byte"], one.num_compared) for one in strangest("a", lines)]
    slow = sorted(one["gap_nats_per_byte"] for one in lines)[:ROWS_PER_PAIR]
    assert [gap for gap, _ in told] == slow
    assert [peers for _, peers in told] == [len(gaps[one.line["step"]]) for one in strangest("a", lines)]


def test_what_is_not_in_a_file_is_said(tmp_path):
    """A file that was thinned names its steps; one that cannot be read is a problem, and the others are shown."""
    head = b'{"every_steps":4}\n'
    (tmp_path / "a.jsonl").write_bytes(head + json.dumps(line("x", -1.0, step=4)).encode() + b"\n")
    (tmp_path / "b.jsonl").write_bytes(b"broken\n")
    (tmp_path / "c.jsonl").mkdir()
    found = strange_answers(tmp_path)
    assert [(one.receiver, one.line["record_id"], one.num_compared) for one in found.answers] == [("a", "x", 1)]
    assert found.every_steps == {"a": 4}
    assert [problem.partition(str(tmp_path))[2] or problem for problem in found.problems] == [
        "/b.jsonl:1: 1 damaged line is left out, this one",
        "c.jsonl cannot be read (Is a directory)",
    ]
    assert "The file of a grew too long: it has only the steps that are multiples of 4." in strange_table(found)


def test_the_page_shows_them(make_run):
    """Beside the cost of the pair, from the files that the supervisor wrote."""
    run = RunFolder(make_run(steps=20))
    row = RowResidual(source="llama", prompt_id="p", record_id="odd", answer=0, trained=True, gap_nats_per_byte=-3.25)
    ResidualWriter(run.residuals).write(ResidualsRecord(role="learner/qwen", policy="qwen", step=4, rows=[row]))
    page = write_report(run.path).read_text()
    assert "Strangest answers per pair" in page
    assert "odd #0" in page
    assert "-3.250" in page


def test_the_page_names_a_file_that_cannot_be_read(make_run):
    """Among the other problems; who needs the run's series only, as a comparison does, never opens it."""
    run = RunFolder(make_run(steps=20))
    run.residuals.mkdir()
    (run.residuals / "qwen.jsonl").write_bytes(b"broken\n")
    assert "qwen.jsonl:1: 1 damaged line is left out" in write_report(run.path).read_text()
    assert read_run(run.path).problems == []
