"""Which runs a comparison consists of, and which of them are done."""

import json
from datetime import date
from unittest.mock import Mock

import pytest

from mrl.cli.compare import notes
from mrl.config.load import load_config
from mrl.config.run_folder import dump_config
from mrl.errors import ConfigError
from mrl.hub_names import HubName, snapshot
from mrl.processes.preparation import prompt_days
from mrl.processes.preparation.comparison_plan import FITTED, check_earlier, config_toml, plan_runs
from mrl.processes.preparation.replayed_run import with_replay
from mrl.processes.preparation.tuning import planned_tuning, rung_runs
from tests.support.compared_runs import CONFIG, TEACHER, arguments, finish

OLD, NEW = "0123456789" * 4, "9876543210" * 4


def test_every_regime_meets_every_seed_and_seeds_come_first(tmp_path):
    """A comparison that is stopped early has some of every regime."""
    runs = plan_runs(arguments(tmp_path, "--regimes", "independent,sgt,sgt", "--seeds", "2"))
    assert [(run.regime, run.seed) for run in runs] == [("independent", 1), ("sgt", 1), ("independent", 2), ("sgt", 2)]
    assert [run.folder.name for run in runs] == ["independent-1", "sgt-1", "independent-2", "sgt-2"]
    assert all(run.config.run.sync and run.config.run.steps == 3 for run in runs)
    assert {run.config.run.seed for run in runs} == {1, 2}
    assert runs[1].config.sharing["regime"] == "sgt"


def test_the_reported_settings_have_a_row_of_their_own(tmp_path):
    """Beside those that the configuration tunes, in folders of their own; as the baseline too."""
    tuned = ("--sharing.sgt.lambda", "0.6", "--sharing.sgt.normaliser", "rescues")
    for rows in ("sgt,sgt-reported", "sgt-reported,sgt"):
        runs = plan_runs(arguments(tmp_path, "--regimes", rows, "--seeds", "1", *tuned))
        told = {run.folder.name: run.config.sharing for run in runs}
        assert list(told) == [f"{row}-1" for row in rows.split(",")]
        assert {sharing["regime"] for sharing in told.values()} == {"sgt"}
        found = {name: (one["sgt"]["lambda"], one["sgt"]["normaliser"]) for name, one in told.items()}
        assert found == {"sgt-1": (0.6, "rescues"), "sgt-reported-1": (0.1, "prompts")}


def test_a_frozen_policy_is_left_out_where_nobody_asks_it(tmp_path):
    """Under its regime it stays; the file that is trained says the same as the plan, and the tables say what is out."""
    independent, rlad = both = plan_runs(arguments(tmp_path, "--regimes", "independent,rlad", "--seeds", "1", *TEACHER))
    assert (list(independent.config.policies), independent.left_out) == (["a", "b"], ("t",))
    assert (list(rlad.config.policies), rlad.left_out) == (["a", "b", "t"], ())
    for one in both:
        one.config_toml.parent.mkdir(exist_ok=True)
        one.config_toml.write_text(config_toml(one.config))
        assert load_config(one.config_toml) == one.config
    assert notes(both, both) == ["independent: runs without t (frozen), which this regime never uses"]
    assert notes(both, [independent])[1:] == [f"not in the tables: {rlad.folder} (the run did not finish)"]


def test_a_replayed_run_is_filled_in_as_the_run_itself_does(tmp_path):
    """So that a run that is done is known again; the baseline has none, and the file that is trained says the same."""
    whose = ("--sharing.replay.run", str(tmp_path / "old"), "--sharing.replay.policies", '["a"]')
    independent, sgt = both = plan_runs(arguments(tmp_path, "--regimes", "independent,sgt", "--seeds", "1", *whose))
    assert "replay" not in independent.config.sharing
    replay = {"run": str(tmp_path / "old"), "policies": ["a"], "prefix": "replay"}
    assert sgt.config.sharing["replay"] == replay
    for one in both:
        one.config_toml.parent.mkdir(exist_ok=True)
        one.config_toml.write_text(config_toml(one.config))
        assert with_replay(load_config(one.config_toml)) == one.config
        finish(one)
        assert one.state().is_done


def test_a_run_with_one_policy_more_is_another_run(tmp_path):
    """As one that an earlier comparison trained with its frozen policy."""
    run, whole = plan_runs(arguments(tmp_path, "--regimes", "independent,rlad", "--seeds", "7,7", *TEACHER))
    finish(run)
    assert run.state().is_done
    earlier = dump_config(run.config) | {"policies": dump_config(whole.config)["policies"]}
    (run.folder / "config.json").write_text(json.dumps(earlier))
    assert not run.state().is_done
    with pytest.raises(ConfigError, match="independent-7: the folder holds a run of another configuration"):
        check_earlier([run])


def test_a_policy_that_the_baseline_leaves_out_keeps_its_day_as_well(tmp_path, monkeypatch):
    """The same command goes on after midnight."""
    asked = arguments(tmp_path, "--regimes", "independent,rlad", "--seeds", "1", *TEACHER)
    asked.overrides = [*asked.overrides, "--policies.t.prompt.chat_template", "{{ strftime_now('%d %b %Y') }}"]
    for one in plan_runs(asked):
        finish(one)
    monkeypatch.setattr(prompt_days, "date", Mock(today=lambda: date(2099, 1, 1)))
    check_earlier(plan_runs(asked))
    assert all(one.state().is_done for one in plan_runs(asked))


def test_an_unknown_regime_is_refused_by_the_name_of_the_file(tmp_path):
    """Before anything is written."""
    with pytest.raises(ConfigError, match=r"small\.toml: sharing\.regime: no such regime; got 'sgd'.*did you mean sgt"):
        plan_runs(arguments(tmp_path, "--regimes", "independent,sgd"))


def test_seeds_may_be_listed_and_pace_be_free(tmp_path):
    """`11,13` are two seeds, `--async` is asynchronous."""
    runs = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "13,11", "--async"))
    assert [one.seed for one in plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "11,"))] == [11]
    assert [run.seed for run in runs] == [13, 11]
    assert not any(run.config.run.sync for run in runs)
    asked = arguments(tmp_path, "--regimes", "sgt", "--seeds", "1", "--async")
    asked.config.write_text(CONFIG.replace("steps = 4", "steps = 4\nsync = true"))
    assert not plan_runs(asked)[0].config.run.sync, "also where the configuration says otherwise"


def test_runs_that_evaluate_nothing_are_not_compared(tmp_path):
    """Refused before the first of them is begun."""
    asked = arguments(tmp_path, "--regimes", "sgt", "--seeds", "1")
    asked.overrides = [*asked.overrides, "--evaluation.every", "-1"]
    with pytest.raises(ConfigError, match=r"evaluation\.every: runs that evaluate nothing cannot be compared; got -1"):
        plan_runs(asked)


@pytest.mark.parametrize("seeds", ["", "three", "0", "-1", "1,x"])
def test_what_is_no_number_of_seeds_is_refused(tmp_path, seeds):
    """In one line that says what is wanted."""
    with pytest.raises(ConfigError, match="--seeds: not a number of seeds"):
        plan_runs(arguments(tmp_path, f"--seeds={seeds}"))


@pytest.mark.parametrize("regimes", ["", "independent,,sgt", "independent,"])
def test_a_regime_without_a_name_is_refused(tmp_path, regimes):
    """By the option, not by a key that follows from it; spaces between names do not matter."""
    with pytest.raises(ConfigError, match="--regimes: a regime has no name"):
        plan_runs(arguments(tmp_path, f"--regimes={regimes}"))
    runs = plan_runs(arguments(tmp_path, "--regimes=independent, sgt", "--seeds=1"))
    assert [one.regime for one in runs] == ["independent", "sgt"]


def test_a_run_is_done_when_every_learning_policy_was_evaluated_at_its_end(tmp_path):
    """A frozen one has no end; a missing evaluation leaves the run open."""
    first, second = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "2"))
    assert not first.state().is_done
    finish(first)
    finish(second, policies=("a",))
    assert first.state().is_done
    check_earlier([first, second])
    assert not second.state().is_done


def test_models_of_the_hub_are_those_of_any_run_that_was_begun(tmp_path):
    """Of the tuning for the final runs and the other way round; one of the same name comes first, a torn one last."""
    asked = arguments(tmp_path, "--regimes", "sgt", "--seeds", "1", "--tune", "2", "--tune-seeds", "5,")
    asked.config.write_text(CONFIG.replace("models/a", "maker/One-2B"))
    rung = rung_runs(asked, planned_tuning(asked))["sgt", 1][0]
    (run,) = plan_runs(asked)
    assert run.config.policies["a"].source == rung.config.policies["a"].source == ""

    def begin(one, commit):
        name = HubName("maker/One-2B").at(commit)
        table = {"model": str(snapshot(name)), "source": str(name), "model_revision": HubName("maker/One-2B").revision}
        tables = dump_config(one.config)["policies"]
        one.folder.mkdir(parents=True)
        (one.folder / "config.json").write_text(
            json.dumps(dump_config(one.config) | {"policies": tables | {"a": tables["a"] | table}})
        )

    begin(rung, OLD)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "config.json").write_text("{")
    (found,) = plan_runs(asked)
    assert found.config.policies["a"].source == f"maker/One-2B@{OLD}"
    begin(run, NEW)
    assert plan_runs(asked)[0].config.policies["a"].source == f"maker/One-2B@{NEW}"
    others = rung_runs(asked, planned_tuning(asked))
    assert {one.config.policies["a"].source for found in others.values() for one in found} == {f"maker/One-2B@{OLD}"}


def test_a_run_of_another_configuration_is_not_done(tmp_path):
    """Other steps, or another learning rate: the earlier run says nothing about this one, and is not deleted for it."""
    (run,) = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    check_earlier([run])
    finish(run, pool={"train_prompts": 5, "held_out_prompts": 5, "seed": 1})
    assert not run.state().is_done
    with pytest.raises(ConfigError, match="sgt-7: the folder holds a run of another configuration"):
        check_earlier([run])


def test_models_that_were_made_at_the_start_do_not_matter(tmp_path):
    """A run's own folder holds the resolved model paths."""
    (run,) = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    resolved = dump_config(run.config)["policies"]
    resolved["a"]["model"] = "/somewhere/else"
    finish(run, policies=resolved)
    for name in ("a", "b"):
        (run.folder / "evaluation" / f"{name}-3.json").write_text("{}")
    assert not run.state().can_resume
    (run.folder / "config.json").write_text(json.dumps(dump_config(run.config) | {"policies": resolved}))
    assert run.state().is_done


FITTED_BY_A_RUN = {
    "learner": {"microbatch_tokens": 1024, "activation_checkpointing": True},
    "rollout": {"answers_at_once": 8},
}


def finish_with(run, tables):
    """A run that came to its end, with other values in the tables of its first policy."""
    policies = dump_config(run.config)["policies"]
    for table, values in tables.items():
        policies["a"][table] |= values
    finish(run)
    (run.folder / "config.json").write_text(json.dumps(dump_config(run.config) | {"policies": policies}))


def test_keys_that_a_run_fitted_to_its_host_do_not_matter(tmp_path):
    """Where they were left out: the run's own folder holds what it chose."""
    (run,) = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    finish_with(run, FITTED_BY_A_RUN)
    assert run.state().is_done
    check_earlier([run])
    assert {table: tuple(values) for table, values in FITTED_BY_A_RUN.items()} == FITTED


@pytest.mark.parametrize(
    ("words", "tables", "told"),
    [
        (
            ["--policies.a.learner.microbatch_tokens", "2048"],
            {"learner": {"microbatch_tokens": 1024}},
            "another policies.a.learner.microbatch_tokens; got 1024; wanted 2048",
        ),
        (
            ["--policies.a.rollout.answers_at_once", "16"],
            {"rollout": {"answers_at_once": 8}},
            "another policies.a.rollout.answers_at_once; got 8; wanted 16",
        ),
        ([], {"learner": {"lr": 1e-5}}, "another policies.a.learner.lr; got 1e-05"),
        ([], {"rollout": {"group_size": 4}}, "another policies.a.rollout.group_size; got 4;"),
    ],
)
def test_keys_that_were_given_and_others_do(tmp_path, words, tables, told):
    """A run with another value is another run."""
    (run,) = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7", *words))
    finish_with(run, tables)
    with pytest.raises(ConfigError, match=f"holds a run of another configuration, which has {told}"):
        check_earlier([run])


def test_a_run_is_resumed_once_every_learner_has_a_checkpoint(tmp_path):
    """Otherwise it starts anew."""
    (run,) = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    finish(run, policies=())
    (run.folder / "checkpoints" / "a" / "step_2").mkdir(parents=True)
    assert not run.state().can_resume
    (run.folder / "checkpoints" / "b" / "step_2").mkdir(parents=True)
    assert run.state().can_resume
