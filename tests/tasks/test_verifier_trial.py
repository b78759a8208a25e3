"""What `mrl check` finds out about a verifier."""

from pathlib import Path

import pytest

from mrl.config.schema import TaskTable
from mrl.errors import TaskError
from mrl.tasks.verifier_trial import tells_nothing, try_verifier

VERIFIERS = """
def exact(reference, answer, prompt):
    return {"right": float(answer == reference), "short": -0.5 if prompt else 9.0}

def blind(reference, answer):
    return 0.5

def strict(reference, answer):
    return None if answer != reference else 1.0
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A module `own` of verifiers, which verifier processes find."""
    (tmp_path / "own.py").write_text(VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    return tmp_path / "own.py"


def table(function: str) -> TaskTable:
    return TaskTable(source="words", dataset="trim", verifier=f"own:{function}", reward_weights={})


def test_references_and_wrong_answers_are_judged(own):
    """Of three prompts; wrong is what answers another one."""
    trials = try_verifier("t", table("exact"), seed=1)
    assert len({one.prompt for one in trials}) == 3
    assert [one.of_reference.reward for one in trials] == [0.5] * 3
    assert [one.of_wrong.reward for one in trials] == [-0.5] * 3
    assert all(one.of_reference.extracted == one.reference != one.of_wrong.extracted for one in trials)
    assert trials[0].of_wrong.rewards == {"right": 0.0, "short": -0.5}
    assert not tells_nothing(trials)


def test_one_reward_for_everything_is_noticed(own):
    """It is no mistake that can be proved."""
    assert tells_nothing(try_verifier("t", table("blind"), seed=1))


def test_a_verifier_that_fails_is_refused(own):
    """Which answer, what came, from where."""
    line = 1 + VERIFIERS.splitlines().index("def strict(reference, answer):")
    message = (
        rf"^tasks\.t\.verifier: the verifier own:strict failed on the answer '.*' to '.*'; "
        rf"got .*no_number: returned None, which is no number \({own}:{line} in strict\).*; wanted a finite number"
    )
    with pytest.raises(TaskError, match=message):
        try_verifier("t", table("strict"), seed=1)
