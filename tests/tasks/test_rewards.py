"""What counts as a reward, what as a failure, and what a verifier is given: in a real process."""

from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.tasks.rewards import MAX_REWARD, Outcome, outcome_of, weighted_sum
from mrl.tasks.source import Item
from mrl.tasks.verifier_pool import VerifierPool
from mrl.tasks.verifier_process import VerifierCall, extras_of
from mrl.tasks.verify import Judge, Verdict, VerificationRequest, check_verifier
from mrl.tasks.words import WordSource

VERIFIERS = """
import json, re

def given(reference, answer, *, prompt, row):
    return {"prompt": prompt == "what?", "row": row == {"prompt": "what?", "n": [1]}, "text": answer == reference}

def anything(reference, answer, **given):
    return len(given)

def says(reference, answer):
    return eval(answer)

def parses(reference, answer):
    return json.loads(answer)["n"]

def hangs(reference, answer):
    while answer == "loop":
        pass
    re.match(r"(a+)+$", "a" * 64 + "b")

def swapped(answer, reference):
    return 1.0

def lacking(answer):
    return 1.0

async def later(reference, answer):
    return 1.0

def too_many(reference, answer, tests):
    return 1.0

def prompt_first(prompt, answer):
    return 1.0
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A module `own` of verifiers, which verifier processes find."""
    (tmp_path / "own.py").write_text(VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    return tmp_path / "own.py"


def ask(function: str, *answers: str, timeout_s: float = 60.0, **extras: str) -> list[Outcome]:
    """What a function of `own` gives for these answers to the reference "right"."""
    with closing(VerifierPool(f"own:{function}", processes=1, timeout_s=timeout_s, wall_factor=100.0)) as pool:
        return pool.submit([VerifierCall("right", answer, **extras) for answer in answers]).result()


@pytest.mark.parametrize("value", [1.0, 0.5, -1.0, 5.0, 0, True, MAX_REWARD, np.float32(0.25), Fraction(1, 3)])
def test_any_finite_number_is_a_reward(value):
    """Of whatever kind of number."""
    assert outcome_of(value) == Outcome.of(float(value))


@pytest.mark.parametrize(
    ("value", "failure", "words"),
    [(None, "no_number", "returned None, which is not a number (v.py:1 in f)"),
     ("1.0", "no_number", "returned '1.0', which is not a number"),
     ((1.0, "fine"), "no_number", "returned (1.0, 'fine'), which is not a number"),
     (np.ones(2), "no_number", "returned array([1., 1.]), which is not a number"),
     (float("nan"), "not_finite", "returned nan"),
     (float("-inf"), "not_finite", "returned -inf"),
     (2 * MAX_REWARD, "too_large", "returned 2000000.0, which exceeds 1,000,000 in absolute value; scale the rewards"),
     ({}, "reward_names", "returned 0 rewards; wanted 1 to 16"),
     ({1: 1.0}, "reward_names", "returned a reward named 1; wanted letters"),
     ({"a/b": 1.0}, "reward_names", "returned a reward named 'a/b'"),
     ({"right": 1.0, "form": None}, "no_number", "returned None as form, which is not a number")],
)  # fmt: skip
def test_what_is_no_reward_is_a_failure_that_says_so(value, failure, words):
    """With the place of the verifier."""
    found = outcome_of(value, "v.py:1 in f")
    assert (found.failure, found.rewards) == (failure, {})
    assert found.words.startswith(words)
    assert found.words.endswith("(v.py:1 in f)")


def test_several_rewards_are_summed_by_their_weights():
    """A name without a weight has 1."""
    assert weighted_sum({"right": 1.0, "form": 0.5, "length": -2.0}, {"form": 0.2, "length": 0.25}) == 0.6


def test_a_verifier_takes_prompt_and_row_by_name(own):
    """Where it has arguments of these names, or takes all; the row is a dict."""
    row = '{"prompt": "what?", "n": [1]}'
    assert ask("given", "right", prompt="what?", row=row) == [Outcome({"prompt": 1.0, "row": 1.0, "text": 1.0})]
    assert ask("anything", "x") == [Outcome.of(2.0)]


def test_half_a_character_in_a_row_is_no_failure(own):
    """JSON may hold what no text can."""
    assert ask("anything", "x", row='{"a": "\ud800"}') == [Outcome.of(2.0)]


@pytest.mark.parametrize(
    ("function", "reason"),
    [("swapped", "the reference must be the first argument"), ("lacking", "too many positional"),
     ("too_many", "missing a required"), ("prompt_first", "multiple values"),
     ("later", "async functions are not supported")],
)  # fmt: skip
def test_a_verifier_that_cannot_be_called_is_refused_at_the_start(function, reason, own):
    """It says how it is called, and what it takes."""
    with pytest.raises(TaskError, match=rf"own:{function}\(.*\) cannot be called as \(reference, answer\).*{reason}"):
        check_verifier("t", TaskTable(source="words", dataset="trim", verifier=f"own:{function}"))


def test_what_raised_is_told_with_its_line_and_the_verifier_s(own):
    """The innermost line, and where the verifier called it."""
    raised, right = ask("parses", "no json", '{"n": 1}')
    assert raised.failure == "raised"
    line = 1 + VERIFIERS.splitlines().index('    return json.loads(answer)["n"]')
    assert raised.words.startswith("JSONDecodeError: Expecting value: line 1 column 1 (char 0) (")
    assert "/json/decoder.py:" in raised.words
    assert raised.words.endswith(f"called at {own}:{line} in parses)")
    assert right == Outcome.of(1.0)
    (missing,) = ask("parses", "{}")
    assert missing.words == f"KeyError: 'n' ({own}:{line} in parses)"


@pytest.mark.parametrize("answer", ["loop", "regex"])
def test_what_hangs_is_told_with_its_line(answer, own):
    """Also inside a regular expression, where no handler of Python's runs."""
    (late,) = ask("hangs", answer, timeout_s=0.3)
    assert late.failure == "timeout"
    assert late.words.startswith("no reply within 0.3 s of CPU time or 30 s of wall-clock time (")
    assert f"{own}:" in late.words
    assert late.words.endswith(" in hangs)")


def test_a_number_of_a_kind_that_tells_no_signature_is_called_as_ever():
    """One written in C."""
    assert extras_of(max, "builtins:max") == ()


def judged(table: dict[str, object], *answers: str) -> list[Verdict]:
    """Verdicts of `own:says`, which gives what the answer evaluates to."""
    task = TaskTable(source="words", dataset="trim", verifier="own:says", verifier_processes=1, **table)
    source = WordSource("trim", {}, seed=1, where="")
    source.verifier = task.verifier
    judge = Judge({"t": task})
    try:
        asked = [VerificationRequest("t", source, Item("p", "", "", 0), answer) for answer in answers]
        return judge.submit(asked).result()
    finally:
        judge.close()


def test_the_reward_is_the_number_that_the_verifier_gave(own):
    """Fractions and negative ones; an answer that is empty, or fails, has the task's reward for that."""
    found = judged({"failed_reward": -2.0}, "0.5", "-1", "5", "", "1/0")
    assert [one.reward for one in found] == [0.5, -1.0, 5.0, -2.0, -2.0]
    assert [one.failure for one in found] == ["", "", "", "", "raised"]
    assert found[4].words.startswith("ZeroDivisionError: division by zero (")


def test_named_rewards_are_summed_and_kept(own):
    """By the weights of the task."""
    found = judged({"reward_weights": {"right": 1.0, "form": 0.5}}, "{'form': 1, 'right': -1}")
    assert found == [Verdict(-0.5, "{'form': 1, 'right': -1}", {"form": 1.0, "right": -1.0})]


@pytest.mark.parametrize(
    ("answer", "words"),
    [("{'right': 1, 'from': 1}", "unknown reward from, missing reward form; tasks.t.reward_weights has form, right"),
     ("{'right': 1}", "missing reward form; tasks.t.reward_weights has form, right"),
     ("1", "unknown reward (a single number), missing reward form, right; tasks.t.reward_weights has form, right")],
)  # fmt: skip
def test_rewards_of_other_names_are_failures(answer, words, own):
    """Than the task's weights have."""
    assert judged({"reward_weights": {"right": 1.0, "form": 0.5}}, answer) == [
        Verdict(0.0, answer, failure="reward_names", words=words)
    ]


def test_without_weights_the_first_answer_says_the_names(own):
    """All later ones have to have them."""
    first, second = judged({}, "{'right': 1, 'form': 1}", "{'right': 1}")
    assert (first.reward, first.failure) == (2.0, "")
    assert second.words == "missing reward form; the first answer had form, right"


def test_a_sum_beyond_bounds_is_a_failure(own):
    """Whatever its parts are."""
    (found,) = judged({"reward_weights": {"right": 1e6}}, "{'right': 2}")
    assert (found.reward, found.failure) == (0.0, "too_large")
