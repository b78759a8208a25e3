"""Which runs a comparison consists of, and which of them are done."""

import argparse
import json
from pathlib import Path

import pytest

from mrl.cli.compare import add_arguments, check_earlier, plan, run
from mrl.config.run_folder import dump_config
from mrl.errors import ConfigError

CONFIG = """
[run]
name = "small"
steps = 4
[tasks.trim]
source = "words"
dataset = "trim"
[policies.a]
model = "models/a"
[policies.b]
model = "models/b"
[policies.t]
model = "models/t"
frozen = true
"""


def arguments(folder: Path, *words: str) -> argparse.Namespace:
    config = folder / "small.toml"
    config.write_text(CONFIG)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    found = parser.parse_args([str(config), "--folder", str(folder / "runs"), *words])
    found.overrides = ["--run.steps", "3"]
    return found


def finish(run, *, policies=("a", "b"), **changes) -> None:
    """The files of a run that came to its end."""
    folder = run.folder
    (folder / "evaluation").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dump_config(run.config) | changes))
    for name in policies:
        (folder / "evaluation" / f"{name}-3.json").write_text("{}")


def test_every_regime_meets_every_seed_and_seeds_come_first(tmp_path):
    """A comparison that is stopped early has some of every regime."""
    runs = plan(arguments(tmp_path, "--regimes", "independent,sgt,sgt", "--seeds", "2"))
    assert [(run.regime, run.seed) for run in runs] == [("independent", 1), ("sgt", 1), ("independent", 2), ("sgt", 2)]
    assert [run.folder.name for run in runs] == ["independent-1", "sgt-1", "independent-2", "sgt-2"]
    assert all(run.config.run.sync and run.config.run.steps == 3 for run in runs)
    assert {run.config.run.seed for run in runs} == {1, 2}
    assert runs[1].config.sharing["regime"] == "sgt"


def test_seeds_may_be_listed_and_pace_be_free(tmp_path):
    """`11,13` are two seeds, `--async` is asynchronous."""
    runs = plan(arguments(tmp_path, "--regimes", "sgt", "--seeds", "13,11", "--async"))
    assert [run.seed for run in runs] == [13, 11]
    assert not any(run.config.run.sync for run in runs)
    asked = arguments(tmp_path, "--regimes", "sgt", "--seeds", "1", "--async")
    asked.config.write_text(CONFIG.replace("steps = 4", "steps = 4\nsync = true"))
    assert not plan(asked)[0].config.run.sync, "also where the configuration says otherwise"


def test_a_number_of_jobs_below_zero_is_refused(tmp_path):
    """In one line, before anything is trained."""
    with pytest.raises(ConfigError, match="--jobs: not a number of runs"):
        run(arguments(tmp_path, "--jobs=-1"))


@pytest.mark.parametrize("seeds", ["", "three", "0", "-1", "1,x"])
def test_what_is_no_number_of_seeds_is_refused(tmp_path, seeds):
    """In one line that says what is wanted."""
    with pytest.raises(ConfigError, match="--seeds: not a number of seeds"):
        plan(arguments(tmp_path, f"--seeds={seeds}"))


def test_a_run_is_done_when_every_learning_policy_was_evaluated_at_its_end(tmp_path):
    """A frozen one has no end; a missing evaluation leaves the run open."""
    first, second = plan(arguments(tmp_path, "--regimes", "sgt", "--seeds", "2"))
    assert not first.is_done
    finish(first)
    finish(second, policies=("a",))
    assert first.is_done
    check_earlier([first, second])
    assert not second.is_done


def test_a_run_of_another_configuration_is_not_done(tmp_path):
    """Other steps, or another learning rate: the earlier run says nothing about this one, and is not deleted for it."""
    (run,) = plan(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    check_earlier([run])
    finish(run, pool={"train_prompts": 5, "held_out_prompts": 5, "seed": 1})
    assert not run.is_done
    with pytest.raises(ConfigError, match="sgt-7: holds a run of another configuration"):
        check_earlier([run])


def test_models_that_were_made_at_the_start_do_not_matter(tmp_path):
    """A run's own folder holds the resolved model paths."""
    (run,) = plan(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    resolved = dump_config(run.config)["policies"]
    resolved["a"]["model"] = "/somewhere/else"
    finish(run, policies=resolved)
    for name in ("a", "b"):
        (run.folder / "evaluation" / f"{name}-3.json").write_text("{}")
    assert not run.can_resume
    (run.folder / "config.json").write_text(json.dumps(dump_config(run.config) | {"policies": resolved}))
    assert run.is_done


def test_a_run_is_resumed_once_every_learner_has_a_checkpoint(tmp_path):
    """Otherwise it starts anew."""
    (run,) = plan(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    finish(run, policies=())
    (run.folder / "checkpoints" / "a" / "step_2").mkdir(parents=True)
    assert not run.can_resume
    (run.folder / "checkpoints" / "b" / "step_2").mkdir(parents=True)
    assert run.can_resume
