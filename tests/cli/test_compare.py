"""Which runs a comparison consists of, and which of them are done."""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cli import compare
from mrl.cli.compare import add_arguments, check_earlier, notes, plan, run
from mrl.cli.main import split_overrides
from mrl.config.load import load_config
from mrl.config.run_folder import dump_config
from mrl.config.toml_text import config_toml
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

TEACHER = ("--sharing.rlad.teacher", "t")


def arguments(folder: Path, *words: str) -> argparse.Namespace:
    config = folder / "small.toml"
    config.write_text(CONFIG)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    own, overrides = split_overrides(words, {"--regimes", "--seeds", "--async", "--jobs"})
    found = parser.parse_args([str(config), "--folder", str(folder / "runs"), *own])
    found.overrides = ["--run.steps", "3", *overrides]
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


def test_a_frozen_policy_is_left_out_where_nobody_asks_it(tmp_path):
    """Under its regime it stays; the file that is trained says the same as the plan, and the tables say what is out."""
    independent, rlad = both = plan(arguments(tmp_path, "--regimes", "independent,rlad", "--seeds", "1", *TEACHER))
    assert (list(independent.config.policies), independent.left_out) == (["a", "b"], ("t",))
    assert (list(rlad.config.policies), rlad.left_out) == (["a", "b", "t"], ())
    for one in both:
        one.config_toml.parent.mkdir(exist_ok=True)
        one.config_toml.write_text(config_toml(one.config))
        assert load_config(one.config_toml) == one.config
    assert notes(both, both) == ["independent: without t (frozen), which it never asks"]
    assert notes(both, [independent])[1:] == [f"not in the tables: {rlad.folder} did not come to its end"]


def test_a_run_with_one_policy_more_is_another_run(tmp_path):
    """As one that an earlier comparison trained with its frozen policy."""
    run, whole = plan(arguments(tmp_path, "--regimes", "independent,rlad", "--seeds", "7,7", *TEACHER))
    finish(run)
    assert run.is_done
    earlier = dump_config(run.config) | {"policies": dump_config(whole.config)["policies"]}
    (run.folder / "config.json").write_text(json.dumps(earlier))
    assert not run.is_done
    with pytest.raises(ConfigError, match="independent-7: holds a run of another configuration"):
        check_earlier([run])


def test_an_unknown_regime_is_refused_by_the_name_of_the_file(tmp_path):
    """Before anything is written."""
    with pytest.raises(ConfigError, match=r"small\.toml: sharing\.regime: no such regime; got 'sgd'.*did you mean sgt"):
        plan(arguments(tmp_path, "--regimes", "independent,sgd"))


def test_a_signal_ends_the_runs_that_were_begun(tmp_path, monkeypatch, capsys):
    """As Ctrl-C does; a line says that nothing is lost."""
    (one,) = plan(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))
    started = []

    def start(_run):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[-1]

    monkeypatch.setattr(compare, "_start", start)
    monkeypatch.setattr(compare.time, "sleep", lambda _seconds: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        compare._train_all([one], jobs=1)
    assert [process.poll() for process in started] == [-signal.SIGTERM]
    assert "interrupted; the same command goes on from here" in capsys.readouterr().out


def test_a_run_that_fails_says_why_and_where(tmp_path, monkeypatch, capsys):
    """The reason that `mrl train` gave, and the file that holds the rest."""
    (one,) = plan(arguments(tmp_path, "--regimes", "sgt", "--seeds", "7,7"))

    def start(run):
        run.output.parent.mkdir(parents=True)
        run.output.write_text("going\nmrl: error: learner/a: no memory\n")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(compare, "_start", start)
    compare._train_all([one], jobs=1)
    told = capsys.readouterr().out
    assert f"{one.folder}: failed with exit code 3 (learner/a: no memory), see {one.output} and" in told


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
