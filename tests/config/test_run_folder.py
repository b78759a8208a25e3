"""A run folder appears whole or not at all, and is never overwritten or continued unasked."""

import json
import multiprocessing
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog

from mrl.config import run_folder
from mrl.config.load import validate
from mrl.config.run_folder import (
    RunFolder,
    create_run_folder,
    lock_run_folder,
    read_run_config,
    start_attempt,
    write_json,
)
from mrl.config.schema import RunConfig
from mrl.errors import RunFolderError
from tests.support.word_runs import word_run


def config_in(folder: Path, *policies: str, steps: int = 3, min_free_mib: int = 1) -> RunConfig:
    run = {"steps": steps, "folder": str(folder), "min_free_mib": min_free_mib}
    return word_run({name: {} for name in policies or ("a",)}, run=run)


def refusal(config: RunConfig, *, clean: bool = False, resume: bool = False) -> str:
    with pytest.raises(RunFolderError) as caught:
        create_run_folder(config, clean=clean, resume=resume)
    return str(caught.value)


def test_a_new_folder_holds_the_resolved_config(tmp_path: Path) -> None:
    """config.json reads back as the same configuration, and the keys' folder is private."""
    folder = create_run_folder(config_in(tmp_path / "runs"))
    assert folder.path == tmp_path / "runs" / "r"
    assert read_run_config(folder.path) == config_in(tmp_path / "runs")
    assert folder.keys.stat().st_mode & 0o777 == 0o700
    assert folder.evaluation.is_dir()


def test_an_existing_run_needs_clean_or_resume(tmp_path: Path) -> None:
    """Without a flag the run is refused with both cures and left as it was."""
    folder = create_run_folder(config_in(tmp_path))
    folder.metrics_jsonl.write_text("{}\n")
    line = refusal(config_in(tmp_path))
    assert "--resume" in line
    assert "--clean" in line
    assert folder.metrics_jsonl.read_text() == "{}\n"
    assert "cannot be used together" in refusal(config_in(tmp_path), clean=True, resume=True)


def test_clean_deletes_the_earlier_run(tmp_path: Path) -> None:
    """After clean nothing of the earlier run is left, beside it neither."""
    create_run_folder(config_in(tmp_path)).metrics_jsonl.write_text("{}\n")
    folder = create_run_folder(config_in(tmp_path, steps=9), clean=True)
    assert not folder.metrics_jsonl.exists()
    assert read_run_config(folder.path).run.steps == 9
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize("content", [None, "[]", '{"name": "other tool"}', "{"])
def test_clean_leaves_folders_that_are_no_run_alone(tmp_path: Path, content: str | None) -> None:
    """Only a folder with mrl's own config.json is ever deleted."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("x")
    if content is not None:
        (tmp_path / "r" / "config.json").write_text(content)
    assert "not a run of mrl" in refusal(config_in(tmp_path), clean=True)
    assert (tmp_path / "r" / "thesis.tex").read_text() == "x"


def test_resume_keeps_everything_and_takes_the_new_config(tmp_path: Path) -> None:
    """Resume needs an earlier run with the same policies."""
    assert "no run to resume" in refusal(config_in(tmp_path), resume=True)
    create_run_folder(config_in(tmp_path)).metrics_jsonl.write_text("{}\n")
    folder = create_run_folder(config_in(tmp_path, steps=9), resume=True)
    assert folder.metrics_jsonl.exists()
    assert read_run_config(folder.path).run.steps == 9
    assert "policies: differs from the value in the run; got 'a, b'; wanted a;" in refusal(
        config_in(tmp_path, "a", "b"), resume=True
    )


def changed(config: RunConfig, dotted: str, value: object) -> RunConfig:
    """`config` with one key set, through its JSON form."""
    tables = config.model_dump(mode="json")
    *above, key = dotted.split(".")
    table = tables
    for name in above:
        table = table[name]
    table[key] = value
    return validate(tables, where="test")


RECIPE = {"architecture": "llama", "tokenizer": "metaspace"}


@pytest.mark.parametrize(
    ("dotted", "value", "got", "wanted"),
    [
        ("tasks.copy.dataset", "trim", "'trim'", "'copy'"),
        ("tasks.copy.options", {"n": 3}, "{'n': 3}", "{}"),
        ("tasks.trim", {"source": "words", "dataset": "trim"}, "'copy, trim'", "copy"),
        ("pool.seed", 18, "18", "17"),
        ("run.seed", 2, "2", "1"),
        ("run.sync", True, "True", "False"),
        ("policies.a.frozen", True, "True", "False"),
        ("sharing.regime", "sgt", "'sgt'", "'independent'"),
        ("policies.a.model", "other", "'", "/m'"),
    ],
)
def test_resume_refuses_what_would_change_the_meaning_of_a_checkpoint(
    tmp_path: Path, dotted: str, value: object, got: str, wanted: str
) -> None:
    """The key, what was found, what the run has, and a cure; the run stays as it was."""
    folder = create_run_folder(config_in(tmp_path))
    line = refusal(changed(config_in(tmp_path), dotted, value), resume=True)
    key = "tasks" if dotted == "tasks.trim" else dotted
    assert f"{key}: differs from the value in the run" in line
    assert f"got {got}" in line
    assert f"{wanted}; cure: resume with the same value, or choose another --run.name" in line
    assert read_run_config(folder.path) == config_in(tmp_path)


def test_resume_refuses_tasks_in_another_order(tmp_path: Path) -> None:
    """The order decides at which position of the pool a prompt stands."""
    config = changed(config_in(tmp_path), "tasks.trim", {"source": "words", "dataset": "trim"})
    create_run_folder(config)
    turned = config.model_copy(update={"tasks": dict(reversed(config.tasks.items()))})
    assert "tasks: differs from the value in the run; got 'trim, copy'; wanted copy, trim;" in refusal(
        turned, resume=True
    )


def test_resume_compares_recipes_and_not_where_made_policies_lie(tmp_path: Path) -> None:
    """The folder of a made policy is filled in after the first check; its recipe says what it is."""
    config = changed(config_in(tmp_path), "policies.a", {"make": RECIPE})
    create_run_folder(changed(config, "policies.a.model", "/cache/1"))
    create_run_folder(config, resume=True)
    other = changed(config, "policies.a.make.num_layers", 5)
    assert "policies.a.make.num_layers: differs from the value in the run; got 5; wanted 4" in refusal(
        other, resume=True
    )
    given = changed(config_in(tmp_path), "policies.a", {"model": "/cache/1"})
    assert "policies.a.make: differs from the value in the run" in refusal(given, resume=True)


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("run.steps", 9),
        ("run.max_minutes", 3.0),
        ("policies.a.learner.lr", 0.1),
        ("evaluation.every", 7),
        ("sharing.sgt", {"lambda": 0.3}),
        ("allocation.slots", 128),
    ],
)
def test_resume_takes_new_values_of_everything_else(tmp_path: Path, dotted: str, value: object) -> None:
    """Length, learning rate, evaluation and machine may change between two attempts."""
    create_run_folder(config_in(tmp_path))
    create_run_folder(changed(config_in(tmp_path), dotted, value), resume=True)


@pytest.mark.parametrize(
    ("sync", "saved", "refused"),
    [
        (False, {"a": [3, 6]}, "a already has a checkpoint of step 6; got 5; wanted >= 6; cure: set --run.steps 6 "),
        (False, {"a": [3], "b": [10]}, "b already has a checkpoint of step 10; got 5; wanted >= 10"),
        (False, {"a": [3, 5]}, ""),
        (False, {}, ""),
        (True, {"a": [3, 6], "b": [3, 6]}, "a already has a checkpoint of step 6; got 5; wanted >= 6"),
        (True, {"a": [3, 6], "b": [3]}, ""),
        (True, {"a": [6], "b": [9]}, ""),
        (True, {"a": [6]}, ""),
    ],
)
def test_resume_refuses_an_end_before_the_step_that_it_goes_on_from(
    tmp_path: Path, sync: bool, saved: dict[str, list[int]], refused: str
) -> None:
    """Policies that step together go on from their newest common step; what is half written does not count."""
    config = changed(config_in(tmp_path, "a", "b", steps=5), "run.sync", sync)
    folder = create_run_folder(changed(config, "run.steps", 99))
    for policy, steps in saved.items():
        for step in steps:
            (folder.checkpoints(policy) / f"step_{step}").mkdir(parents=True)
        (folder.checkpoints(policy) / ".incomplete-step_50").mkdir()
        (folder.checkpoints(policy) / "run_epoch").write_text("1")
    if not refused:
        create_run_folder(config, resume=True)
        return
    line = refusal(config, resume=True)
    assert f"{folder.path}: run.steps: " in line
    assert refused in line
    assert read_run_config(folder.path).run.steps == 99


def test_a_run_that_is_going_on_is_not_touched(tmp_path: Path) -> None:
    """The lock refuses clean and resume until it is released."""
    folder = create_run_folder(config_in(tmp_path))
    release = lock_run_folder(folder)
    for clean, resume in ((True, False), (False, True)):
        assert "still running" in refusal(config_in(tmp_path), clean=clean, resume=resume)
    with pytest.raises(RunFolderError, match="still running"):
        lock_run_folder(folder)
    release()
    create_run_folder(config_in(tmp_path), resume=True)


def _begin_again_and_again(number: int, folder: Path, barrier: Any, won: Any, *, rounds: int, clean: bool) -> None:
    """One of several processes that begin the same run at the same moments; what it has won, it holds for a round."""
    for turn in range(rounds):
        name = "r" if clean else f"r{turn}"
        config = changed(changed(config_in(folder), "run.steps", number), "run.name", name)
        barrier.wait(60)
        with ExitStack() as closing:
            try:
                run = create_run_folder(config, clean=clean, closing=closing)
            except RunFolderError:
                run = None
            barrier.wait(60)
            if run is not None and read_run_config(run.path).run.steps == number:
                won.put((turn, number))
            elif run is not None:
                won.put((turn, -number))
            barrier.wait(60)


@pytest.mark.parametrize("clean", [True, False])
def test_of_several_that_begin_at_once_one_has_the_folder(tmp_path: Path, clean: bool) -> None:
    """All others are refused, and the configuration is that of the one."""
    rounds, processes = 60, multiprocessing.get_context("fork")
    barrier, won = processes.Barrier(3), processes.SimpleQueue()
    if clean:
        create_run_folder(config_in(tmp_path))
    started = [
        processes.Process(
            target=_begin_again_and_again, args=(n, tmp_path, barrier, won), kwargs={"rounds": rounds, "clean": clean}
        )
        for n in (1, 2, 3)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    winners = []
    while not won.empty():
        winners.append(won.get())
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert sorted(turn for turn, _ in winners) == list(range(rounds)), winners
    assert min(number for _, number in winners) > 0


def test_a_run_that_begins_while_another_one_is_built_is_not_cleaned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--clean` deletes the run that it found, and there was none."""
    config, write = config_in(tmp_path), run_folder.write_json
    with ExitStack() as closing:

        def begin_first(path: Path, value: object) -> None:
            monkeypatch.setattr(run_folder, "write_json", write)
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(os, "getpid", lambda: 1)
                create_run_folder(changed(config, "run.steps", 7), closing=closing)
            write(path, value)

        monkeypatch.setattr(run_folder, "write_json", begin_first)
        with pytest.raises(RunFolderError, match="still running"):
            create_run_folder(config, clean=True)
    assert read_run_config(run_folder.run_folder_of(config).path).run.steps == 7


def test_a_deleted_lock_lets_nobody_in(tmp_path: Path) -> None:
    """The folder itself is locked; without it another one is found under the lock's name."""
    folder = create_run_folder(config_in(tmp_path))
    release = lock_run_folder(folder)
    (folder.path / "lock").unlink()
    with pytest.raises(RunFolderError, match="still running"):
        lock_run_folder(folder)
    release()
    lock_run_folder(folder)()


def test_too_little_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """The free disk is checked before anything is written."""
    assert "not enough free disk space" in refusal(config_in(tmp_path / "runs", min_free_mib=10**9))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """A file where the folder or its parent should be is one clear line."""
    (tmp_path / "r").write_text("x")
    assert "is a file" in refusal(config_in(tmp_path))
    assert "the path is a file, but" in refusal(config_in(tmp_path / "r"))


def test_a_failed_creation_leaves_nothing_behind(tmp_path: Path) -> None:
    """When the folder cannot be put in place, neither it nor its parents remain."""
    parent = tmp_path / "new"
    config = config_in(parent / ("x" * 300))
    assert "cannot write to" in refusal(config)
    assert not parent.exists()


def test_a_failed_clean_keeps_the_earlier_run(tmp_path: Path) -> None:
    """The earlier run goes only once the new folder is complete, which leaves nothing behind when it cannot go."""
    folder = create_run_folder(config_in(tmp_path))
    folder.metrics_jsonl.write_text("{}\n")
    blocker = tmp_path / f".r.old-{os.getpid()}"
    blocker.touch()
    assert "cannot write to" in refusal(config_in(tmp_path), clean=True)
    assert folder.metrics_jsonl.exists()
    assert sorted(tmp_path.iterdir()) == [blocker, folder.path]


def test_what_a_killed_clean_left_goes_with_the_next_one(tmp_path: Path) -> None:
    """In a container each has the same process id. What another one is about to delete stays."""
    folder, others = create_run_folder(config_in(tmp_path)), tmp_path / ".r.old-1"
    for left in (others, tmp_path / f".r.old-{os.getpid()}"):
        (left / "checkpoints").mkdir(parents=True)
    release = lock_run_folder(RunFolder(others))
    create_run_folder(config_in(tmp_path), clean=True)
    assert sorted(tmp_path.iterdir()) == [others, folder.path]
    release()
    create_run_folder(config_in(tmp_path), clean=True)
    assert list(tmp_path.iterdir()) == [folder.path]


def test_a_clean_that_cannot_delete_everything_has_begun_a_run_all_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    """The new folder is in place and its owner's; what stays of the earlier run is named."""
    create_run_folder(config_in(tmp_path))
    delete, left = shutil.rmtree, tmp_path / f".r.old-{os.getpid()}"

    def refuse(path: Path, *, ignore_errors: bool = False) -> None:
        if path != left:
            delete(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with ExitStack() as closing, structlog.testing.capture_logs() as logs:
        folder = create_run_folder(config_in(tmp_path, steps=9), clean=True, closing=closing)
        assert read_run_config(folder.path).run.steps == 9
        assert "still running" in refusal(config_in(tmp_path), clean=True)
    assert ([line["left"] for line in logs], left.is_dir()) == ([str(left)], True)


def test_attempts_are_numbered_and_latest_points_at_the_newest(tmp_path: Path) -> None:
    """Every attempt has a folder of its own with the configuration it ran."""
    folder = create_run_folder(config_in(tmp_path))
    assert [start_attempt(folder).name for _ in range(3)] == ["attempt_1", "attempt_2", "attempt_3"]
    assert (folder.logs / "latest").resolve().name == "attempt_3"
    assert json.loads((folder.logs / "latest" / "config.json").read_text())["run"]["name"] == "r"


def test_reading_something_else_as_a_run_is_one_line(tmp_path: Path) -> None:
    """A folder without config.json is refused."""
    with pytest.raises(RunFolderError, match="not a run folder"):
        read_run_config(tmp_path)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{}", r"config\.json: run: missing; wanted a table; cure: use the version of mrl that started this run"),
        ('{"run": {"old": 1}}', r"config\.json: run\.old: unknown key; got 'old'; cure: use the version of mrl"),
        ('{"run":', r"config\.json: damaged \(Invalid JSON: EOF.*\); wanted what the run wrote at its start"),
        ("[]", r"config\.json: damaged \(Input should be an object\)"),
        (b"\xff", "config\\.json cannot be read"),
    ],
)
def test_a_configuration_of_another_version_or_a_damaged_one_is_one_line(
    tmp_path: Path, written: str | bytes, told: str
) -> None:
    """The key that this version does not know is named, and the cure."""
    data = written.encode() if isinstance(written, str) else written
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(RunFolderError, match=told):
        read_run_config(tmp_path)


def test_write_json_replaces_atomically(tmp_path: Path) -> None:
    """A value that is no JSON leaves the old file and no temporary one."""
    write_json(tmp_path / "f.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "f.json", {"a": object()})
    assert json.loads((tmp_path / "f.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]
    assert RunFolder(tmp_path).weights("p") == tmp_path / "weights" / "p"
