"""What goes by rewards before the vote is refused beside a verifier "collective", each with its cure."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import validate
from mrl.config.rules.run_rules import check_rules
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, TaskError
from mrl.processes.preparation.learning_values import check_learning, warnings
from mrl.processes.preparation.preflight import check_tasks
from mrl.sharing.regimes import check_sharing
from mrl.tasks.pool import build_pool

PAGE = (Path(__file__).parents[3] / "docs" / "collective.md").read_text(encoding="utf-8")


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
    ("tables", "key", "cure"),
    [
        *(
            ({"sharing": {"regime": name}}, "sharing.regime", "use one of these regimes")
            for name in ("sgt", "prp", "hacpo", "graft", "rlad")
        ),
        (
            {"sharing": {"regime": "xgrpo", "replay": {"run": "runs/old"}}},
            "sharing.replay",
            r"remove \[sharing.replay\]",
        ),
        (
            {"sharing": {"regime": "xgrpo", "xgrpo": {"peer_wait_s": 3.0}}},
            "sharing.xgrpo.peer_wait_s",
            "set sharing.collective.peer_wait_s instead",
        ),
        ({"pool": {"keep_solved": 0.5}}, "pool.keep_solved", "set --pool.keep_solved 1"),
        ({"pool": {"keep_hopeless": 0.0}}, "pool.keep_hopeless", "set --pool.keep_hopeless 1"),
        (
            {"policies": {"a": {"model": "m"}, "b": {"model": "m", "objective": {"method": "dapo"}}}},
            "policies.b.objective.drop_uniform_groups",
            "set policies.b.objective.drop_uniform_groups = false",
        ),
    ],
)
def test_what_goes_by_rewards_before_the_vote_is_refused(tables, key, cure):
    """Where the task is judged by its data set the same passes."""
    what = (
        rf"test: {key}: the answers of tasks.trim have no rewards until the vote; got .*; wanted .*; cure: {cure}, or "
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
        (
            {"judge": {"url": "http://127.0.0.1:1/v1", "model": "m"}},
            "tasks.trim.verifier: cannot be combined with a judge",
        ),
    ],
)
def test_keys_of_other_verifiers_are_refused(task, what):
    """As beside a data set's own scorer."""
    with pytest.raises(ConfigError, match=what):
        check_rules(config_with(task), where="test")


def test_an_evaluator_has_nothing_to_give_its_texts_to():
    """What it makes of an answer would not be voted on."""
    with pytest.raises(TaskError, match="an evaluator needs a verifier"):
        check_tasks(config_with({"evaluator": "builtins:str"}), [].append)


def test_keys_of_the_vote_are_checked():
    """A misspelt one is told with the nearest."""
    with pytest.raises(ConfigError, match=r"sharing\.collective\.peer_wait: unknown key.*peer_wait_s"):
        check_sharing({"regime": "independent", "collective": {"peer_wait": 3.0}}, "test")


def test_the_page_s_configuration_votes_on_prompts_without_labels(tmp_path, monkeypatch):
    """It passes every rule, and rows whose references are empty give verdicts that are left to the vote."""
    [toml] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    rows = [{"prompt": f"question {number}", "reference": ""} for number in range(40)]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = validate(tomllib.loads(toml), where="test")
    check_rules(config, where="test")
    check_learning(config, where="test")
    pool = build_pool(config.tasks, config.pool)
    try:
        [verdict] = pool.submit([(pool.prompt_at(0).prompt_id, "so <answer> 7 </answer>")]).result()
    finally:
        pool.close()
    assert (verdict.reward, verdict.extracted, verdict.is_voted) == (0.0, "7", True)


def test_groups_of_different_sizes_that_vote_are_told_of():
    """The smaller one agrees with itself by chance."""
    sizes = {name: {"model": "m", "rollout": {"group_size": size}} for name, size in (("a", 2), ("b", 16))}
    (told,) = (line for line in warnings(config_with(policies=sizes), {}) if "by vote" in line)
    assert told.startswith("policies.X.rollout.group_size differs (a 2, b 16), and answers are judged by vote")
    assert not any("by vote" in line for line in warnings(config_with(), {}))


def test_waits_for_votes_that_nobody_gives_are_told_of():
    """A table that nothing reads."""
    task = {"source": "words", "dataset": "trim", "verifier": ""}
    sharing = {"regime": "independent", "collective": {"peer_wait_s": 3.0}}
    assert 'sharing.collective: has no effect, because no task has verifier = "collective"' in list(
        warnings(config_with(task, sharing=sharing), {})
    )
    assert not any("collective" in line for line in warnings(config_with(sharing=sharing), {}))
