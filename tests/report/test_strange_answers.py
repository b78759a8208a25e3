"""The strangest answers per pair, from residual files to the page."""

import re

import pytest

from mrl.config.run_folder import RunFolder
from mrl.metrics.jsonl import ResidualWriter
from mrl.records.telemetry import ResidualsRecord, RowResidual
from mrl.report.page import write_report
from mrl.report.run_data import RunData
from mrl.report.strange_answers import ROWS_PER_PAIR, strange_table


def line(record_id: str, gap: float | None, *, step: int = 1, source: str = "b") -> dict:
    known = {} if gap is None else {"gap_nats_per_byte": gap, "gap_nats": 40 * gap, "ess_weight": 0.25, "bytes": 40}
    return {"step": step, "source": source, "record_id": record_id, "answer": 2, "flags": ["NORM"]} | known


@pytest.fixture
def data() -> RunData:
    lines = [line("x0", -0.1), line("x1", -0.9), line("<x2>", -0.5, step=7), line("x3", -0.7), line("none", None)]
    return RunData("run", {}, ["a", "b"], [], residuals={"a": [*lines, line("y", 0.2, source="c")], "b": []})


def test_the_most_negative_gaps_come_first(data):
    """A few per pair, those without a figure left out, text from outside escaped."""
    table = strange_table(data)
    assert re.findall(r"<td>([^<]*) #2</td>", table) == ["x1", "x3", "&lt;x2&gt;", "y"]
    assert len(re.findall("b &rarr; a", table)) == ROWS_PER_PAIR
    assert "none #2" not in table


def test_a_weight_is_set_against_the_fair_share_of_its_step(data):
    """0.25 among the three compared of step 1, among the one of step 7, and among the one of the other peer."""
    weights = re.findall(r'class="n">([^<]*)</td><td>norm</td>', strange_table(data))
    assert weights == ["0.75", "0.75", "0.25", "0.25"]


def test_nothing_to_compare_is_no_table(data):
    """Without figures there is nothing to show."""
    data.residuals = {"a": [line("none", None)]}
    assert strange_table(data) == ""


def test_the_page_shows_them(make_run):
    """Beside the cost of the pair, from the files that the supervisor wrote."""
    run = RunFolder(make_run(steps=20))
    row = RowResidual(source="llama", prompt_id="p", record_id="odd", answer=0, trained=True, gap_nats_per_byte=-3.25)
    ResidualWriter(run.residuals).write(ResidualsRecord(role="learner/qwen", policy="qwen", step=4, rows=[row]))
    page = write_report(run.path).read_text()
    assert "Strangest answers per pair" in page
    assert "odd #0" in page
    assert "-3.250" in page
