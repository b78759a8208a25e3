"""The table of what the canary finds: as it is nothing is judged wrongly, and each of its two bounds is needed."""

import json

import check_canary
import pytest
from canary_check.cases import cases

from mrl.weights import canary

pytestmark = pytest.mark.thorough


@pytest.fixture
def last_line(monkeypatch, capsys):
    """Run the quick form; its exit code, and the rows of its last line by their names."""

    def run() -> tuple[int, dict[str, dict]]:
        monkeypatch.setattr("sys.argv", ["check_canary.py", "--quick"])
        code = check_canary.main()
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        return code, {row["name"]: row for row in rows}

    return run


def test_healthy_engines_are_believed_and_faulty_ones_found(last_line):
    """Or said to be beyond what can be told, at a step far below rounding."""
    code, rows = last_line()

    assert code == 0
    assert rows["healthy engines refused"]["value"] == rows["faulty engines believed"]["value"] == 0
    assert rows["faulty engines found"]["value"] >= 7


@pytest.mark.parametrize(
    ("name", "value", "missed"),
    [
        ("NOISE_MULTIPLE", 0.5, "healthy engines refused"),
        ("NOISE_MULTIPLE", 1e3, "faulty engines believed"),
        ("SURE_ERRORS", 1e3, "faulty engines believed"),
    ],
)
def test_a_bound_that_is_wrong_is_told(last_line, monkeypatch, name, value, missed):
    """By what it refuses, or believes."""
    monkeypatch.setattr(canary, name, value)
    monkeypatch.setattr("mrl.learner.trainer.excess", lambda off_T, noise_T: "")  # the learner's own check stays out

    code, rows = last_line()

    assert (code, rows[missed]["ok"]) == (1, False)


def test_all_sizes_and_formats_are_tried():
    """In the whole table."""
    tried = list(cases(quick=False))

    assert {case.num_layers for case in tried} == {4, 8, 16, 32}
    assert {case.logit_std for case in tried} == {1.0, 2.0, 3.0, 4.0}
    assert {(case.precision, case.engine) for case in tried} == {
        ("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")
    }  # fmt: skip
