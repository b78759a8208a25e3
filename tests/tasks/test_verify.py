from dataclasses import dataclass

import pytest

from mrl.tasks.source import Item
from mrl.tasks.verify import extract_answer, judge


@dataclass
class Scores:
    """A source that gives every answer the same score."""

    value: float

    def items(self, limit):
        return iter(())

    def score(self, item, answer):
        return self.value


@pytest.mark.parametrize(
    ("completion", "answer"),
    [("<answer>4</answer>", "4"), ("<answer>3</answer> no, <answer> 4\n</answer> yes", "4"), (" 4\n", "4"),
     ("<answer>4", "<answer>4"), ("a <answer></answer>", ""), ("", "")],
)  # fmt: skip
def test_the_last_answer_tag_counts(completion, answer):
    """The last closed tag wins; without one the whole text is the answer."""
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(("score", "reward"), [(1.0, 1.0), (0.999, 0.0), (0.5, 0.0), (0.0, 0.0)])
def test_only_a_full_score_is_rewarded(score, reward):
    """Partial credit of a scorer is shown and never rewarded."""
    verdict = judge(Scores(score), Item("p", "", "", 0), "x")
    assert (verdict.reward, verdict.raw_score, verdict.extracted) == (reward, score, "x")
