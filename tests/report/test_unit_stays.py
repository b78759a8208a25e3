"""Who had which unit when, as the page shows it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config.run_folder import RunFolder
from mrl.report.page import write_report
from mrl.report.unit_stays import read_units, units_html

LEASE = [
    (0.0, "cpu:0", "", "free", "proved empty"),
    (1.0, "cpu:0", "qwen", "granted", "wanted"),
    (3.0, "cpu:0", "qwen", "active", "its engine spoke"),
    (7.0, "cpu:0", "qwen", "draining", "llama <gains> more"),
    (8.0, "cpu:0", "qwen", "clearing", "ended"),
    (9.0, "cpu:0", "", "free", "proved empty"),
    (0.0, "cpu:1", "llama", "dead", "no proof"),
]


def journal(path: Path, lines=LEASE, tail: bytes = b"") -> Path:
    """A file of transitions, as the allocator writes it."""
    names = ("time_unix_s", "unit", "policy", "state", "why")
    rows = [json.dumps(dict(zip(names, line, strict=True)) | {"epoch": 1}) for line in lines]
    path.write_bytes("".join(row + "\n" for row in rows).encode() + tail)
    return path


def test_a_state_lasts_until_the_next_one_and_the_last_until_the_end(tmp_path):
    """Units by name, times as they were told; a torn line is nothing."""
    units = read_units(journal(tmp_path / "units.jsonl", tail=b'{"unit": "cpu:0", "sta'), 10.0)

    assert list(units.stays) == ["cpu:0", "cpu:1"]
    lengths = [(stay.state, stay.ended_s - stay.began_s) for stay in units.stays["cpu:0"]]
    assert lengths == [("free", 1), ("granted", 2), ("active", 4), ("draining", 1), ("clearing", 1), ("free", 1)]
    assert units.stays["cpu:1"][0].ended_s == 10.0
    assert units.extent == (0.0, 10.0)


def test_the_type_of_a_unit_is_told_where_it_is_known(tmp_path):
    path = journal(tmp_path / "units.jsonl")
    typed = {"unit": "cpu:1", "policy": "", "state": "free", "why": "", "time_unix_s": 5.0, "type": "A<10>"}
    path.write_bytes(path.read_bytes() + json.dumps(typed).encode() + b"\n")
    units = read_units(path, 10.0)
    assert units.types == {"cpu:0": "", "cpu:1": "A<10>"}
    html = units_html(units, ["qwen"], {})
    assert "<td>cpu:1</td><td>A&lt;10&gt;</td>" in html
    assert "<td>cpu:0</td><td></td>" in html


def test_shares_and_reasons_are_told(tmp_path):
    """Served 40 % of the time, moving for 40, nobody's for 20; idle for half of it. The move's reason stays text."""
    html = units_html(
        read_units(journal(tmp_path / "units.jsonl"), 10.0),
        ["qwen", "llama"],
        {"allocation/idle_share/cpu:0": [0.75, 0.25]},
    )

    row = html.partition("<td>cpu:0</td>")[2].partition("</tr>")[0]
    assert [cell.partition("<")[0] for cell in row.split('<td class="n">')[1:]] == [
        "40%",
        "0%",
        "40%",
        "20%",
        "50%",
        "1",
    ]
    other = html.partition("<td>cpu:1</td>")[2].partition("</tr>")[0]
    assert ">-</td>" in other, "nothing was told of its engine"
    assert "llama &lt;gains&gt; more" in html
    assert "<gains>" not in html
    assert html.count('class="mark c0"') == 1
    assert html.count('class="area c0"') == 3
    assert html.count('class="waited"') == 1


def test_only_a_run_with_units_has_the_section(make_run: Callable[..., Path]):
    """Others share slots."""
    folder = make_run()
    title = "Who had which unit"
    assert title not in write_report(folder).read_text()

    journal(RunFolder(folder).units_jsonl)
    assert title in write_report(folder).read_text()


@pytest.mark.parametrize("content", [b"", b"[]\n", b"\xff\n", b'{"unit": "cpu:0"}\n'])
def test_what_is_no_transition_is_left_out(tmp_path, content):
    """As after a full disk."""
    (tmp_path / "units.jsonl").write_bytes(content)

    assert units_html(read_units(tmp_path / "units.jsonl", 10.0), ["qwen"], {}) == ""


def test_idle_units_are_read_from_the_metrics(make_run: Callable[..., Path]):
    """Of every interval."""
    folder = make_run()
    journal(RunFolder(folder).units_jsonl)
    for idle in (0.2, 0.4):
        values = {"allocation/idle_share/cpu:0": idle}
        line = {"type": "metrics", "role": "allocator", "policy": "", "step": 1, "time_unix_s": 1.0, "values": values}
        with RunFolder(folder).metrics_jsonl.open("a") as file:
            file.write(json.dumps(line) + "\n")
    html = write_report(folder).read_text()
    assert '<td class="n">30%</td>' in html.partition("<td>cpu:0</td>")[2].partition("</tr>")[0]
