from contextlib import closing

import pytest

from mrl.tasks.math_answers import score
from mrl.tasks.rewards import Outcome
from mrl.tasks.verifier_pool import VerifierPool
from mrl.tasks.verifier_process import VerifierCall
from tests.support.math_problems import HARD, MALFORMED, PROBLEMS


@pytest.mark.parametrize("reference", [reference for _, reference, _, _ in PROBLEMS])
def test_equivalent_answers_are_right_and_others_wrong(reference):
    """Fractions, decimals, units, intervals, sets, order, text, equations: the same mathematics and no other."""
    right, wrong = next((yes, no) for _, known, yes, no in PROBLEMS if known == reference)
    assert {answer: score(reference, answer) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: score(reference, answer) for answer in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize("reference", ["5", r"\text{east}", "(-2, 2)"])
def test_what_means_nothing_is_wrong(reference):
    """No malformed answer is taken for right, and none raises."""
    assert {answer: score(reference, answer) for answer in MALFORMED} == dict.fromkeys(MALFORMED, 0.0)


def test_an_answer_that_cannot_be_parsed_is_right_when_it_is_the_reference():
    """Letter for letter, spaces and a last full stop apart."""
    assert score(r"\text{If } x } y", r"\text{If }x } y.") == 1.0


def test_hard_answers_fail_within_the_limit():
    """Huge powers and deep nesting are wrong or out of time; the answer behind each is judged as ever."""
    calls = [VerifierCall("5", answer) for hard in HARD for answer in (hard, "5.0")]
    with closing(VerifierPool("mrl.tasks.math_answers:score", processes=1, timeout_s=0.3)) as pool:
        outcomes = pool.verify(calls)
    assert [sum(one.rewards.values()) for one in outcomes[::2]] == [0.0] * len(HARD)
    assert [outcome.failure for outcome in outcomes[::2]] == ["timeout"] * 2 + [""] * 2
    assert outcomes[1::2] == [Outcome.of(1.0)] * len(HARD)
    assert pool.counts.failures == {"timeout": 2}
