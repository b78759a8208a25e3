"""The end of `mrl train`: report and final table, whatever became of the run folder."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mrl.cli.main import main
from mrl.cli.train import conclude
from mrl.config.run_folder import RunFolder, create_run_folder
from mrl.config.schema import RunConfig
from mrl.report.page import is_small
from mrl.report.run_display import RunDisplay
from tests.support.word_runs import word_run

ROOT = Path(__file__).parents[2]


def config_in(folder: Path) -> RunConfig:
    return word_run({"a": {}}, run={"folder": str(folder), "min_free_mib": 0})


class Ended:
    """What `conclude` asks of a supervisor that is done."""

    def __init__(self, folder: RunFolder, reason: str) -> None:
        self.reason, self.peak_pss_mib, self.attempt = reason, 10.0, folder.logs / "attempt_1"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_run_folder(config_in(tmp_path))


def told(folder: RunFolder, code: int, reason: str = "") -> tuple[int, str]:
    """Exit code, and the final table as printed."""
    output = io.StringIO()
    board = RunDisplay(config_in(folder.path.parent))
    return conclude(folder, Ended(folder, reason), board, Console(file=output), code), output.getvalue()


def test_a_run_ends_with_table_memory_and_report(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """The usual end."""
    code, table = told(folder, 0)
    assert (code, "held-out accuracy" in table) == (0, True)
    assert f"report {folder.report_html}" in capsys.readouterr().out
    assert folder.report_html.exists()


def test_the_report_is_written_when_asked_for(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """`mrl report` prints where."""
    assert main(["report", str(folder.path)]) == 0
    assert capsys.readouterr().out.split() == [str(folder.report_html)]
    assert "<html" in folder.report_html.read_text()


@pytest.mark.parametrize(("before", "after"), [(0, 2), (1, 1), (130, 130)])
def test_a_run_folder_that_vanished_leaves_one_line_and_the_table(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], before: int, after: int
) -> None:
    """A run that went well has failed all the same when nothing of it is left."""
    shutil.rmtree(folder.path)
    code, table = told(folder, before)
    assert (code, "held-out accuracy" in table) == (after, True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("mrl: error: no report: ")
    assert str(folder.path) in lines[0]


def test_a_large_run_gets_no_report_after_a_signal(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C gives the prompt back in seconds; the line says how to get the report."""
    with folder.metrics_jsonl.open("wb") as file:
        file.truncate(10**9)
    (folder.checkpoints("a") / "step_25").mkdir(parents=True)
    code, _ = told(folder, 130, "ended by SIGINT")
    out, err = capsys.readouterr()
    assert code == 130
    assert f"no report was written after the signal, as the run is large; `mrl report {folder.path}` writes it" in out
    logs = folder.logs / "attempt_1"
    assert err == f"mrl: ended by SIGINT; logs in {logs}; the same command with --resume continues the run\n"
    assert not folder.report_html.exists()


def test_a_run_without_a_checkpoint_says_that_it_begins_again(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Synchronous runs save none when they are stopped."""
    told(folder, 130, "ended by SIGINT")
    cure = "no checkpoint was saved, so the same command with --resume begins at the first step\n"
    assert capsys.readouterr().err.endswith(f"; {cure}")


def test_extent_counts_bytes_and_files(folder: RunFolder) -> None:
    """What the report would read: metrics, timeline, evaluations, samples; weights and checkpoints do not count."""
    assert is_small(folder, max_bytes=10, max_files=10)
    (folder.path / "weights" / "w").write_bytes(bytes(100))
    assert is_small(folder, max_bytes=10, max_files=10)
    (folder.rollouts / "step_1").mkdir()
    (folder.rollouts / "step_1" / "a.jsonl").write_bytes(bytes(8))
    assert is_small(folder, max_bytes=10, max_files=10)
    folder.timeline_jsonl.write_bytes(bytes(3))
    assert not is_small(folder, max_bytes=10, max_files=10)
    folder.timeline_jsonl.unlink()
    assert not is_small(folder, max_bytes=7, max_files=10)
    assert not is_small(folder, max_bytes=10, max_files=0)
    (folder.evaluation / "a-0.json").write_text(json.dumps({"policy": "a"}))
    assert not is_small(folder, max_bytes=10, max_files=10)


def test_a_full_disk_below_standard_output_is_one_line() -> None:
    """A command whose output has no room ends with 2 and no traceback."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "mrl", "schema"]
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "mrl: error: No space left on device"
    assert "Traceback" not in done.stderr
