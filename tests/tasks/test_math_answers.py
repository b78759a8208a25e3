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


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [("12", [r"12\%", r"12\text{ square units}", "12_{10}", r"\approx 12", "12..."],
      ["1200%", r"1200\%", r"12 \approx 13", "12 ≈ 13", r"12\text{ or anything}", r"\text{12 or so}",
       r"12 \text{ but not } 13 \text{ or so}", "12_{3}", "12_3", "1 2"]),
     ("12", ["x = 12", "5+7=12", "a=b=12", "f(2) = 12", r"\sum_{i=1}^{2} 4i = 12", "12 = 12"],
      ["13=12", "13 = 12", "12=13", "12 = 13 = 12", "4-1=2=12"]),
     ("1200000", ["1 200 000", "1,200,000"], ["12 00000", "1 2 00000"]),
     (r"\frac{1}{2}", [r"50\%", r"\frac{1}{2} = 0.5"], [r"500\%", r"\frac{1}{2}\%"]),
     (r"\frac{10}{3}", [r"\frac{10}{3} \approx 3.33"], [r"\frac{10}{3} \approx 4"]),
     ("0.33", [r"\frac{1}{3} = 0.33"], [r"\frac{1}{4} = 0.33"]),
     ("2516_8", ["2516_{8}", "2516"], ["2516_7"]),
     (r"\text{yes or no}", [r"\text{Yes or no}"], [r"\text{yes}"]),
     ("1, 2", [r"x=1 \text{ or } x=2", "x=1, y=2"], ["x=1"])],
)  # fmt: skip
def test_an_answer_says_one_thing(reference, right, wrong):
    """Text, approximations, equations, bases, per cents and spaces that make it another answer are not read over."""
    assert {answer: score(reference, answer) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: score(reference, answer) for answer in wrong} == dict.fromkeys(wrong, 0.0)


def test_hard_answers_fail_within_the_limit():
    """Huge powers and deep nesting are wrong or out of time; the answer behind each is judged as ever."""
    calls = [VerifierCall("5", answer) for hard in HARD for answer in (hard, "5.0")]
    with closing(VerifierPool("mrl.tasks.math_answers:score", processes=1, timeout_s=0.3, wall_factor=100.0)) as pool:
        outcomes = pool.submit(calls).result()
    assert [sum(one.rewards.values()) for one in outcomes[::2]] == [0.0] * len(HARD)
    assert [outcome.failure for outcome in outcomes[::2]] == ["timeout"] * 2 + [""] * 2
    assert outcomes[1::2] == [Outcome.of(1.0)] * len(HARD)
    assert pool.counts.failures == {"timeout": 2}
