"""How many answers verifiers failed on, and when that ends a run."""

import pytest

from mrl.errors import TaskError
from mrl.learner.batches import batch_values
from mrl.learner.verifier_limit import VerifierFailures
from mrl.records.rollouts import Answer, ScoredGroup
from tests.support.answers import made_answer

RAISED = "raised: KeyError: 'n' (judges.py:7 in judge)"


def answer(reward: float = 0.0, failure: str = "", **rewards: float) -> Answer:
    """One token of an answer."""
    return made_answer(0, reward=reward, completion=b"x", rewards=rewards, failure=failure)


def group(*answers: Answer, task: str = "trim") -> ScoredGroup:
    """Answers to one prompt of a task."""
    return ScoredGroup(ticket="t", prompt_id="p", task=task, prompt_token_ids=b"", answers=list(answers))


def test_more_than_the_share_ends_the_run_with_the_first_failure():
    """Half is not more than a half. The line names the task, what came first, the key and the cure."""
    failures = VerifierFailures()
    failures.note([group(answer(1.0), answer()), group(answer(failure=RAISED), answer(failure="exited: gone"))])
    failures.check(0.5, step=3)
    assert failures.share == 0.5
    failures.note([group(answer(failure="timeout: late"), task="swap")])
    with pytest.raises(TaskError) as caught:
        failures.check(0.5, step=3)
    assert str(caught.value) == (
        "tasks.trim.verifier: verifiers failed on 3 of the 5 answers of step 3; "
        f"got {RAISED!r}; wanted at most run.max_verifier_failures = 0.5 of them; "
        "cure: fix the verifier (`mrl check` tries it on three prompts), or raise run.max_verifier_failures"
    )
    failures.check(1.0, step=3)


def test_what_a_data_set_s_own_scorer_cannot_read_is_wrong_and_no_failure():
    """Whatever an untrained policy writes ends no run."""
    failures = VerifierFailures()
    failures.note([group(answer(failure="unreadable: ValueError: x"), answer(failure="unevaluated: ValueError: y"))])
    failures.check(0.0, step=1)
    assert failures.share == 0.0


def test_without_answers_nothing_failed():
    """A batch of groups that came before."""
    VerifierFailures().check(0.0, step=1)


def test_rewards_of_any_size_are_told_by_name_and_against_the_bound():
    """A mean per name over the answers that have it; a success reaches the run's bound."""
    groups = [
        group(answer(0.75, right=1.0, form=-0.25), answer(-0.5, right=0.0, form=-0.5)),
        group(answer(failure=RAISED), answer(0.5, right=0.5, form=0.0)),
    ]
    values = batch_values(groups, 0, success_reward=0.5)
    assert values["reward/mean"] == 0.1875
    assert values["reward/named/trim/right"] == 0.5
    assert values["reward/named/trim/form"] == -0.25
    assert (values["reward/all_failed_share"], values["reward/all_passed_share"]) == (0.0, 0.0)
    assert batch_values(groups, 0)["reward/all_failed_share"] == 1.0
