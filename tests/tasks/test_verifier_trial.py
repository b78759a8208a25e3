"""What `mrl check` finds out about a verifier."""

from pathlib import Path

import pytest

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.tasks.verifier_trial import evaluates_nothing, fails_as_they_are, tells_nothing, try_verifier

VERIFIERS = """
import json
def exact(reference, answer, prompt):
    return {"right": float(answer == reference), "short": -0.5 if prompt else 9.0}

def shouted(answer):
    return answer.upper()

def unread(answer):
    return int("none")

def prepare(reference):
    raise RuntimeError("nobody asked for this")

def mrl_prepare_reference(reference):
    KEPT.append(reference)

KEPT = []

def kept(reference, answer):
    return float(KEPT[-1] == reference == answer)

def strict(reference, answer):
    return None if answer != reference else 1.0

def picky(reference, answer):
    return float(answer.split()[0] == reference) if "{" not in answer else None

def same(answer):
    return answer

def written(answer):
    return json.dumps({"result": answer})

def read(reference, answer):
    return float(json.loads(answer)["result"] == reference)
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


def test_behind_an_evaluator_both_are_tried(own):
    """The verifier on references as what an evaluator might make; the evaluator on them as if a policy gave them."""
    behind = table("exact").model_copy(update={"evaluator": "own:shouted"})
    trials = try_verifier("t", behind, seed=1)
    assert [one.of_reference.reward for one in trials] == [0.5] * 3
    assert [one.evaluated.rewards["right"] for one in trials] == [
        float(one.reference == one.reference.upper()) for one in trials
    ]
    assert not evaluates_nothing(trials)


def test_an_evaluator_that_reads_nothing_is_noticed(own):
    """No reference has to be what it reads, so that it is not refused."""
    behind = table("exact").model_copy(update={"evaluator": "own:unread"})
    trials = try_verifier("t", behind, seed=1)
    assert {one.evaluated.failure for one in trials} == {"unevaluated"}
    assert "ValueError: invalid literal" in trials[0].evaluated.words
    assert evaluates_nothing(trials)


def test_a_verifier_has_to_read_nothing_but_what_its_evaluator_writes(own):
    """On references and garbage as they are it may fail: that is told, and nobody is refused."""
    behind = table("read").model_copy(update={"evaluator": "own:written"})
    trials = try_verifier("t", behind, seed=1)
    assert [one.evaluated.reward for one in trials] == [1.0] * 3
    assert [one.of_reference.failure for one in trials] == [one.of_wrong.failure for one in trials] == ["raised"] * 3
    assert [verdict.failure for verdict in trials[0].of_garbage] == ["raised"] * 2
    assert "JSONDecodeError" in trials[0].of_wrong.words
    assert fails_as_they_are(trials)
    assert not tells_nothing(trials)


@pytest.mark.parametrize(("function", "fails"), [("exact", False), ("picky", True)])
def test_a_verifier_that_fails_on_garbage_alone_is_told(own, function, fails):
    """Behind an evaluator, which might write it."""
    behind = table(function).model_copy(update={"evaluator": "own:same"})
    assert fails_as_they_are(try_verifier("t", behind, seed=1)) == fails


def test_a_verifier_that_fails_on_what_its_evaluator_wrote_is_refused(own):
    """By the answer that it was made of."""
    behind = table("strict").model_copy(update={"evaluator": "own:shouted"})
    message = r"^tasks\.t\.verifier: .* own:strict failed on the output of own:shouted for the answer '.*' to '.*'"
    message += r".*; cure: fix the verifier: the verifier returned neither a number nor a dict of named numbers$"
    with pytest.raises(TaskError, match=message):
        try_verifier("t", behind, seed=1)


def test_a_verifier_that_was_not_called_is_not_to_blame(own, monkeypatch):
    """For a row that is too long for its process the cure is about the row."""
    monkeypatch.setattr("mrl.tasks.verifier_pool.MAX_REQUEST_BYTES", 8)
    with pytest.raises(TaskError, match=r"too_long: .*; cure: shorten the prompt or the reference of this row"):
        try_verifier("t", table("exact"), seed=1)


def test_nothing_but_what_is_named_for_it_prepares_the_reference(own):
    """A function `prepare` of the same module means something else."""
    trials = try_verifier("t", table("kept").model_copy(update={"evaluator": "own:shouted"}), seed=1)
    assert [one.of_reference.reward for one in trials] == [1.0] * 3
