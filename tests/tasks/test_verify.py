from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from mrl.config.task_tables import TaskTable
from mrl.tasks.source import Item
from mrl.tasks.verify import Judge, Verdict, VerificationRequest, _then, judge
from mrl.tasks.words import WordSource


@dataclass
class Scores:
    """A source that gives every answer the same score."""

    value: float
    is_finite: bool = False
    verifier: str = ""
    evaluates: bool = False

    def items(self, limit):
        return iter(())

    def extract(self, completion):
        return completion.strip()

    def verifier_reference(self, item):
        return item.reference

    def score(self, item, answer):
        return self.value


@pytest.mark.parametrize(("score", "reward"), [(1.0, 1.0), (0.999, 0.0), (0.5, 0.0), (0.0, 0.0), (2.0, 0.0)])
def test_only_a_full_score_is_rewarded(score, reward):
    """Partial credit of a data set's own scorer is never rewarded."""
    assert judge(Scores(score), Item("p", "", "", 0), " x\n") == Verdict(reward, "x")


def test_named_rewards_of_a_data_sets_own_scorer_are_a_failure():
    """Something else than the scorer has answered then: it is counted, and nobody waits."""
    verdict = judge(Scores({"a": 1.0}), Item("p", "", "", 0), "x")
    assert (verdict.reward, verdict.failure) == (0.0, "reward_names")


def test_verdicts_keep_the_order_of_their_questions(verifiers):
    """Quick answers are judged here, the others in processes, and every verdict stands at its question's place."""
    words, outside = (
        WordSource("rotate", {}, seed=1, where=""),
        Scores(0.5, verifier="tests.support.hard_verifiers:by_text"),
    )
    slow = [
        VerificationRequest("slow", outside, Item("p", "", "", 0, reference="right"), text)
        for text in ("right", "die", "  ", "wrong")
    ]
    quick = [
        VerificationRequest("quick", words, Item("p", "abc", "", 0, "bca"), f"<answer>{text}</answer>")
        for text in ("bca", "abc")
    ]
    table = TaskTable(source="math", dataset="", verifier_processes=1)
    judges = Judge({"slow": table, "quick": table})
    assert judges.values() == {}
    try:
        later = judges.submit(slow)
        assert [(one.reward, one.failure) for one in judges.submit(quick).result()] == [(1.0, ""), (0.0, "")]
        assert [one.reward for one in later.result()] == [1.0, 0.0, 0.0, 0.0]
        assert [one.failure for one in later.result()] == ["", "exited", "", ""]
        assert judges.values() == {
            "verify/answers": 3.0,
            "verify/pending": 0.0,
            "verify/failures/exited": 1.0,
        }
    finally:
        judges.close()


@pytest.mark.parametrize("error", [KeyError("convert"), None])
def test_what_becomes_of_an_answer_is_always_heard(error):
    """A mistake in what is made of the outcomes is raised by whoever awaits the verdicts."""

    def convert(found):
        if error:
            raise error
        return found + 1

    before: Future[int] = Future()
    after = _then(before, convert)
    before.set_result(1)
    assert after.exception(0) is error
    assert error or after.result(0) == 2


def test_quick_tasks_start_no_process():
    """The quickstart pays nothing for verifiers that it does not use."""
    words = WordSource("rotate", {}, seed=1, where="")
    judges = Judge({})
    [verdict] = judges.submit([VerificationRequest("quick", words, Item("p", "abc", "", 0, "bca"), "bca")]).result()
    assert verdict.reward == 1.0
    assert judges.values() == {}


def test_what_is_voted_on_reaches_no_verifier_process():
    """Not even of a data set that judges in one."""
    outside = Scores(0.5, verifier="tests.support.hard_verifiers:by_text")
    judges = Judge({"slow": TaskTable(source="math", dataset="", verifier="collective", failed_reward=-1.0)})
    item = Item("p", "", "", 0, reference="right")
    questions = [VerificationRequest("slow", outside, item, text, is_voted=True) for text in ("right", " ")]
    try:
        verdicts = judges.submit(questions).result()
        assert judges.values() == {}
    finally:
        judges.close()
    assert verdicts == [Verdict(0.0, "right", is_voted=True), Verdict(-1.0, "", is_voted=True)]
