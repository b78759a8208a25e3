"""What goes by rewards before the vote is refused beside a verifier "collective", each with its cure."""

from typing import Any

import pytest

from mrl.config.load import validate
from mrl.config.rules.run_rules import check_rules
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, TaskError
from mrl.processes.preparation.learning_values import check_learning
from mrl.processes.preparation.preflight import check_tasks
from mrl.sharing.regimes import check_sharing


def config_with(task: dict[str, Any] | None = None, **tables: Any) -> RunConfig:
    words = {"source": "words", "dataset": "trim", "verifier": "collective"} | (task or {})
    base = {"run": {"name": "r", "steps": 3}, "tasks": {"trim": words}, "sharing": {"regime": "independent"}}
    return validate(base | {"policies": {"a": {"model": "m"}, "b": {"model": "m"}}} | tables, where="test")


@pytest.mark.parametrize(
    "sharing", [{"regime": "independent", "collective": {"peer_wait_s": 3.0}}, {"regime": "xgrpo"}]
)
def test_what_can_wait_for_the_vote_passes(sharing):
    """No function of that name is looked for, and none is tried."""
    config = config_with(sharing=sharing)
    check_rules(config, where="test")
    check_learning(config, where="test")
    check_tasks(config, [].append, on_trial=pytest.fail)


def test_one_policy_alone_may_vote():
    """Then its own majority decides."""
    check_learning(config_with(policies={"a": {"model": "m"}}), where="test")


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        *(({"sharing": {"regime": name}}, "sharing.regime") for name in ("sgt", "prp", "hacpo", "graft", "rlad")),
        ({"sharing": {"regime": "xgrpo", "replay": {"run": "runs/old"}}}, "sharing.replay"),
        ({"sharing": {"regime": "xgrpo", "xgrpo": {"peer_wait_s": 3.0}}}, "sharing.xgrpo.peer_wait_s"),
        ({"pool": {"keep_solved": 0.5}}, "pool.keep_solved"),
        ({"pool": {"keep_hopeless": 0.0}}, "pool.keep_hopeless"),
        (
            {"policies": {"a": {"model": "m"}, "b": {"model": "m", "objective": {"method": "dapo"}}}},
            "policies.b.objective.drop_uniform_groups",
        ),
    ],
)
def test_what_goes_by_rewards_before_the_vote_is_refused(tables, key):
    """Where the task is judged by its data set the same passes."""
    what = (
        rf"test: {key}: the answers of tasks.trim have no rewards before the vote; got .*; wanted .*; cure: set {key} "
    )
    with pytest.raises(ConfigError, match=what):
        check_learning(config_with(**tables), where="test")
    check_learning(config_with({"verifier": ""}, **tables), where="test")


@pytest.mark.parametrize(
    ("task", "what"),
    [
        ({"reward_weights": {"right": 1.0}}, "tasks.trim.reward_weights"),
        ({"failed_reward": 1.0}, "tasks.trim.failed_reward"),
        ({"source": "environment", "dataset": "lookup"}, "tasks.trim.verifier: the environment gives the reward"),
        ({"judge": {"url": "http://127.0.0.1:1/v1", "model": "m"}}, "tasks.trim.verifier: there is a judge"),
    ],
)
def test_keys_of_other_verifiers_are_refused(task, what):
    """As beside a data set's own scorer."""
    with pytest.raises(ConfigError, match=what):
        check_rules(config_with(task), where="test")


def test_an_evaluator_has_nothing_to_give_its_texts_to():
    """What it makes of an answer would not be voted on."""
    with pytest.raises(TaskError, match="an evaluator without a verifier"):
        check_tasks(config_with({"evaluator": "builtins:str"}), [].append)


def test_keys_of_the_vote_are_checked():
    """A misspelt one is told with the nearest."""
    with pytest.raises(ConfigError, match=r"sharing\.collective\.peer_wait: unknown key.*peer_wait_s"):
        check_sharing({"regime": "independent", "collective": {"peer_wait": 3.0}}, "test")
