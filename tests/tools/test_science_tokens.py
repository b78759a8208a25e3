"""Sharing beside training alone for as many tokens, from made-up outcomes."""

import math

import pytest
import science_tokens

from mrl.report.comparison import AVERAGE, Comparison, RunOutcome

TRAINED = {"independent": 1000.0, "sgt": 1700.0, "sgt-reported": 1300.0}


def outcome(end, trained=0.0):
    """A run that ends there."""
    return RunOutcome({AVERAGE: {0: 0.3, 2: end}}, 2560, 0.0, trained, 0.0, 0.0, 0.0)


def test_the_longer_row_trains_the_tokens_of_every_other_one():
    """As many steps as that takes, and none more."""
    rows = {row: {1: outcome(0.5, trained)} for row, trained in TRAINED.items()}
    steps = science_tokens.steps_for_equal_tokens(Comparison(rows, "independent"), 80)
    assert steps == math.ceil(80 * 1.7) == 136
    assert (steps - 1) / 80 < 1.7 <= steps / 80


def test_rows_are_paired_by_seed():
    """By hand: +.2 and +.3, with Student's t of one degree; a seed that ends alike is not ahead."""
    ends = {"independent, longer": (0.4, 0.6), "sgt": (0.6, 0.9), "independent": (0.4, 0.7)}
    rows = {row: {seed: outcome(end, 10.0) for seed, end in enumerate(both)} for row, both in ends.items()}
    head, _, longer, sgt, alone = science_tokens.table(Comparison(rows, "independent, longer")).splitlines()
    assert "end minus independent, longer" in head
    assert longer == "| independent, longer | 0.500 ± 1.271 |  |  |  | 2,560 | 10 |"
    half = 12.7062 * 0.05
    assert sgt.startswith(f"| sgt | 0.750 ± 1.906 | +0.250 [{0.25 - half:+.3f}, {0.25 + half:+.3f}] | ")
    assert "| 2 of 2 |" in sgt
    assert "| 1 of 2 |" in alone


def test_a_command_that_fails_ends_the_rest(monkeypatch, tmp_path):
    """With its exit code, before anything longer is trained."""
    asked = []
    monkeypatch.setattr(science_tokens, "mrl", lambda words: asked.append(words) or 2)
    with pytest.raises(SystemExit) as ended:
        science_tokens.main([str(tmp_path), "--seeds", "3", "--pool.train_prompts", "64"])
    assert ended.value.code == 2
    (words,) = asked
    assert words[-2:] == ["--pool.train_prompts", "64"]
    assert words[words.index("--seeds") + 1] == "1,"
    assert words[words.index("--policies.llama.make.seed") + 1] == "1"
