"""What `mrl compare` shows of runs that are there, and what it refuses."""

import json
import statistics

import pytest

from mrl.cli.compare import _train, conclude, notes, run
from mrl.errors import ConfigError, MissingError, ModelFolderError, RoleFailed
from mrl.memory_plan.run_memory import run_need
from mrl.metrics.jsonl import MetricsWriter
from mrl.processes.preparation.comparison_plan import PlannedRun, plan_runs
from mrl.records.telemetry_messages import MetricsRecord
from tests.support.compared_runs import arguments, finish

REGIMES = ("--regimes", "independent,sgt", "--seeds", "2")


def measured(one: PlannedRun, *, start: float, end: float) -> None:
    """A run that came to its end, with the accuracies of both policies at steps 0 and 3."""
    finish(one)
    writer = MetricsWriter(one.folder / "metrics.jsonl")
    for step, accuracy in ((0, start), (3, end)):
        for name in ("a", "b"):
            writer.write(
                MetricsRecord(
                    role=f"learner/{name}", policy=name, step=step, time_unix_s=1e9, values={"eval/accuracy": accuracy}
                )
            )
    writer.close()


def test_a_finished_comparison_is_shown_without_its_models(tmp_path, capsys):
    """With `--only-table`: no model is there, nothing is trained, tables and numbers are those of the runs."""
    asked = arguments(tmp_path, *REGIMES, "--only-table")
    for one, end in zip(plan_runs(asked), (0.5, 0.7, 0.3, 0.6), strict=True):
        measured(one, start=0.1 * one.seed, end=end)

    assert run(asked) == 0

    folder = tmp_path / "runs"
    found = json.loads((folder / "comparison.json").read_text())
    assert found["sgt"]["average"]["end"]["mean"] == pytest.approx(0.65)
    half = 12.706205 * statistics.stdev([0.2, 0.3]) / 2**0.5
    assert found["sgt"]["end_against_baseline"] == pytest.approx({"mean": 0.25, "half": half})
    assert "| sgt | 0.150 ± 0.635 | 0.650 ± 0.635 |" in (folder / "comparison.md").read_text()
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "end - independent" in shown
    assert f"wrote {folder / 'comparison.md'}" in shown
    with pytest.raises((MissingError, ModelFolderError), match="models/a"):
        run(arguments(tmp_path, *REGIMES))


def test_the_table_of_an_unfinished_comparison_names_what_is_missing(tmp_path, capsys):
    """Exit code 1; of nothing at all there is no table."""
    asked = arguments(tmp_path, *REGIMES, "--only-table")
    with pytest.raises(ConfigError, match=r"^--folder: no such folder; got '.*runs'"):
        run(asked)
    (tmp_path / "runs").mkdir()
    with pytest.raises(RoleFailed, match="no run has finished"):
        run(asked)
    runs = plan_runs(asked)
    for one in runs[:3]:
        measured(one, start=0.1, end=0.5)
    assert run(asked) == 1
    assert f"not in the tables: {runs[3].folder} (the run did not finish)" in capsys.readouterr().out
    assert not runs[3].folder.exists()


def test_without_a_run_of_the_baseline_there_are_no_differences(tmp_path):
    """No other regime takes its place unsaid: the head keeps its name, cells are empty, a note says why."""
    runs = plan_runs(arguments(tmp_path, "--regimes", "independent,sgt,prp", "--seeds", "1"))
    for one in runs[1:]:
        measured(one, start=0.1, end=0.5)

    assert conclude(runs) == 1

    written = (tmp_path / "runs" / "comparison.md").read_text()
    assert "| regime | start | end | best | area | end - independent | area - independent |" in written
    assert written.partition("Beyond accuracy")[0].count(" | - | - |\n") == 2
    assert "no differences: no run of the baseline independent has finished" in written
    found = json.loads((tmp_path / "runs" / "comparison.json").read_text())
    assert found["prp"]["end_against_baseline"] == {"mean": None, "half": None}
    assert not any("no differences" in note for note in notes(runs, runs[:1]))


@pytest.mark.thorough
def test_runs_are_checked_and_planned_as_they_will_fit_this_host(tmp_path, monkeypatch):
    """What a run will choose for its memory is no part of its configuration before it starts."""
    checked, needed = [], []
    for name, replaced in {
        "mrl.cli.compare.host_memory_bytes": lambda: 2**20,
        "mrl.processes.preparation.preflight.preflight": lambda config, **_: checked.append(config),
        "mrl.processes.preparation.comparison_training.lanes": lambda machine, needs, jobs: (
            needed.extend(needs) or [()]
        ),
        "mrl.processes.preparation.comparison_training.train_missing": lambda runs, places: None,
    }.items():
        monkeypatch.setattr(name, replaced)
    large = ["--policies.a.source", "maker/Large-1B", "--policies.a.rollout.max_new_tokens", "512"]
    runs = plan_runs(arguments(tmp_path, "--regimes", "sgt", "--seeds", "1", *large))
    _train(runs, jobs=0, where="small.toml")

    chosen, plain = checked[0].policies["a"], runs[0].config.policies["a"]
    assert (chosen.rollout.answers_at_once, plain.rollout.answers_at_once) == (8, 0)
    assert needed == [run_need(checked[0])]
    assert needed[0].host_mib < run_need(runs[0].config).host_mib


def test_a_number_of_jobs_below_zero_is_refused(tmp_path):
    """In one line, before anything is trained."""
    with pytest.raises(ConfigError, match="--jobs: invalid number of runs"):
        run(arguments(tmp_path, "--jobs=-1"))


def test_a_folder_that_cannot_hold_a_comparison_is_refused(tmp_path):
    """A file, and the folder of a run, into which nothing is written."""
    folder = tmp_path / "runs"
    folder.write_text("notes")
    with pytest.raises(ConfigError, match=r"^--folder: a file, not a folder; got '.*runs'"):
        run(arguments(tmp_path, *REGIMES))
    folder.unlink()
    folder.mkdir()
    (folder / "config.json").write_text('{"run": {}, "policies": {}, "tasks": {}}')
    with pytest.raises(ConfigError, match=r"^--folder: the folder of a run, not of a comparison; got '.*runs'"):
        run(arguments(tmp_path, *REGIMES))
    assert [one.name for one in folder.iterdir()] == ["config.json"]
