"""Rewards, the bound of success, and what a verifier's failure is worth."""

import pytest

from mrl.config.load import validate
from mrl.config.rules.run_rules import check_rules
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError


def config(task: dict[str, object], **run: object) -> RunConfig:
    """One policy on one task of words."""
    tasks = {"trim": {"source": "words", "dataset": "trim", **task}}
    tables = {"run": {"name": "r", "steps": 3, **run}, "tasks": tasks, "sharing": {"regime": "independent"}}
    made = validate(tables | {"policies": {"a": {"model": "m"}}}, where="test")
    check_rules(made, where="test")
    return made


def test_defaults_are_right_or_wrong():
    """As it ever was."""
    made = config({})
    assert (made.run.success_reward, made.run.max_verifier_failures) == (1.0, 0.5)
    assert (made.tasks["trim"].failed_reward, made.tasks["trim"].reward_weights) == (0.0, {})


def test_rewards_of_an_own_verifier_may_lie_anywhere():
    """Below 0 too, with a reward for failures below the bound."""
    task = {"verifier": "own:judge", "failed_reward": -2.0, "reward_weights": {"right": 1.0, "form": -0.5}}
    assert config(task, success_reward=-1.0).tasks["trim"].reward_weights == {"right": 1.0, "form": -0.5}


@pytest.mark.parametrize(
    ("task", "run", "message"),
    [({"verifier": "own:judge"}, {"success_reward": 0.0}, "failed_reward: .* would count as a success; got 0.0"),
     ({}, {"success_reward": 2.0}, "run.success_reward: answers of tasks.trim are rewarded with 0 or 1; got 2.0"),
     ({"reward_weights": {"right": 1.0}}, {}, "reward_weights: the data set's own verifier returns no named rewards"),
     ({"verifier": "own:judge", "reward_weights": {"a/b": 1.0}}, {}, "tasks.trim.reward_weights"),
     ({"verifier": "own:judge", "reward_weights": {"a": float("nan")}}, {}, "tasks.trim.reward_weights"),
     ({}, {"max_verifier_failures": 1.5}, "run.max_verifier_failures")],
)  # fmt: skip
def test_what_contradicts_is_refused(task, run, message):
    """Before a run, in one line."""
    with pytest.raises(ConfigError, match=message):
        config(task, **run)
