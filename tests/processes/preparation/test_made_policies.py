"""Whoever waits for policies to be made sees how far they are, and none is made by two processes at once."""

import fcntl
import io
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from mrl.processes.preparation import made_policies
from mrl.processes.preparation.made_policies import TELL_EVERY_S, MakingLine, _Making, build_policy

LINES = ["qwen [####....]  50%, 9 s left", "llama [##......]  25%, 20 s left"]


def test_off_a_terminal_it_is_told_in_whole_lines_every_few_seconds() -> None:
    """A log gets one line for each policy, and no control characters."""
    file = io.StringIO()
    with ExitStack() as stack:
        shown, now_s = MakingLine(Console(file=file, width=200), stack), time.monotonic()
        shown.show(LINES, now_s + TELL_EVERY_S / 2)
        assert file.getvalue() == ""
        shown.show(LINES, now_s + TELL_EVERY_S)
        shown.show(LINES, now_s + TELL_EVERY_S)
    assert file.getvalue() == "".join(f"  {line}\n" for line in LINES)


def test_on_a_terminal_it_is_one_line_that_is_gone_in_the_end() -> None:
    """At once, and with its brackets, which rich would take for a style."""
    file = io.StringIO()
    with ExitStack() as stack:
        shown = MakingLine(Console(file=file, width=200, force_terminal=True), stack)
        shown.show(LINES, time.monotonic())
        assert shown._status is not None
        shown._status._live.refresh()
        assert all(line in file.getvalue() for line in LINES)
    assert file.getvalue().endswith("\x1b[2K")


def test_the_last_whole_line_of_a_maker_counts_and_its_place_in_the_file_stays() -> None:
    """The maker writes through the same open file."""
    with tempfile.TemporaryFile() as told:
        making = _Making("qwen", Path("x"), None, told, told, time.monotonic() - 7.0)  # type: ignore[arg-type]
        assert making.progress == "qwen: collecting examples, 7 s"
        told.write(b"qwen 10%\nqwen 20%\nqwe")
        told.flush()
        assert making.progress == "qwen 20%"
        told.write(b"n 30%\n")
        told.flush()
        assert making.progress == "qwen 30%"


def build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that building one policy makes."""
    made: list[Path] = []
    monkeypatch.setattr(made_policies, "_build", lambda _recipe, _name, folder: made.append(folder))
    build_policy({}, "qwen", folder)
    return made


def test_a_policy_that_another_process_makes_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two runs of a comparison that begin together make their policies once."""
    folder = tmp_path / "policies" / "abc"
    folder.mkdir(parents=True)
    with folder.with_suffix(".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def end_of_the_other(_seconds: float) -> None:
            (folder / "config.json").touch()
            fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr("mrl.processes.preparation.made_policies.time.sleep", end_of_the_other)
        assert build(folder, monkeypatch) == []
    assert capsys.readouterr().out == "qwen: another process is making it\n"


def test_a_policy_that_nobody_makes_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the folder is there: somebody asked for it anew."""
    folder = tmp_path / "policies" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert build(folder, monkeypatch) == [folder]


def test_a_policy_that_the_other_failed_to_make_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ended, and left no folder."""
    folder = tmp_path / "policies" / "abc"
    folder.parent.mkdir()
    with folder.with_suffix(".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(
            "mrl.processes.preparation.made_policies.time.sleep", lambda _seconds: fcntl.flock(other, fcntl.LOCK_UN)
        )
        assert build(folder, monkeypatch) == [folder]


def test_a_cache_that_cannot_be_written_is_told_by_the_making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is no condition."""
    (tmp_path / "policies").touch()
    folder = tmp_path / "policies" / "abc"
    assert build(folder, monkeypatch) == [folder]
