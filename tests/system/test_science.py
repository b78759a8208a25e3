"""The miniature of the science programme: killed in the middle of a tuning, it goes on, and repeats nothing."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
SETTING = "staged"


def start(out: Path, log: Path) -> "subprocess.Popen[bytes]":
    """The script in a session of its own."""
    argv = ["bash", str(ROOT / "tools" / "science.sh"), "--quick", SETTING]
    with log.open("ab") as file:
        return subprocess.Popen(
            argv, env={**os.environ, "OUT": str(out)}, stdout=file, stderr=file, start_new_session=True
        )


def ended(out: Path) -> dict[Path, int]:
    """The results of runs that came to their end, of both policies, and when these were written."""
    results = [path for path in out.glob("**/evaluation/*-2.json") if len(list(path.parent.glob("*-2.json"))) == 2]
    return {path: path.stat().st_mtime_ns for path in results}


def kill(process: "subprocess.Popen[bytes]") -> None:
    """The script and all below it, by SIGKILL; then wait until nothing of it lives."""
    below = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for one in below:
        if one.is_running() and "mrl::" not in one.name():
            one.kill()
    psutil.wait_procs(below, timeout=120)


def test_the_miniature_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Both regimes have a choice, their budgets are equal, and what was done before the kill was left alone."""
    out, log = tmp_path / "science", tmp_path / "log"
    process = start(out, log)
    try:
        while process.poll() is None and not ended(out):
            time.sleep(0.1)
    finally:
        kill(process)
    before = ended(out)
    assert before, log.read_text()
    assert not (out / "summary.md").exists()

    process = start(out, log)
    try:
        code = process.wait(1500)
    finally:
        if process.poll() is None:
            kill(process)
    assert code == 0, log.read_text()
    after = ended(out)
    assert before.items() <= after.items()
    tuned = json.loads((out / SETTING / "tuning.json").read_text())["regimes"]
    assert list(tuned) == ["independent", "sgt"]
    assert {one["steps_trained"] for one in tuned.values()} == {2 * 2}
    assert all(one["chosen"] in (0, 1) for one in tuned.values())
    assert len(list((out / SETTING / "tuning").glob("*/config.json"))) == 4
    tables = (out / SETTING / "comparison.md").read_text()
    assert "Gain on independent, paired by seed, and what it cost" in tables
    assert tables in (out / "summary.md").read_text()


def done_with(out: Path, *settings: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The miniature of these settings, at its end."""
    argv = ["bash", str(ROOT / "tools" / "science.sh"), "--quick", *settings]
    return subprocess.run(argv, env={**os.environ, "OUT": str(out), **environment}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("stagd", "science: no such setting: stagd; wanted staged,"),
        ("dose-0.0x", "science: no share of rare operations: dose-0.0x; wanted dose-X with X from 0 to 1"),
        ("dose-1.5", "science: no share of rare operations: dose-1.5;"),
        ("dose-", "science: no share of rare operations: dose-;"),
        ("dose--0.1", "science: no share of rare operations: dose--0.1;"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused(tmp_path: Path, setting: str, told: str) -> None:
    """Before anything is trained, with the names of those that do."""
    done = done_with(tmp_path / "out", "staged", setting)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert done.stderr.startswith(told)


@pytest.mark.slow
def test_a_dose_has_both_strengths_of_sgt_and_its_control(tmp_path: Path) -> None:
    """Without tuning; the control is a plug-in that lies among the tools."""
    done = done_with(tmp_path, "dose-0.01")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "dose-0.01" / "comparison.json").read_text())
    assert list(rows) == ["independent", "sgt", "sgt-reported", "science_controls:OWN_SUCCESSES"]
    assert not (tmp_path / "dose-0.01" / "tuning").exists()
    assert (tmp_path / "doses.md").read_text().splitlines()[-1].startswith("| 0.01 | ")


def test_a_setting_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """Each has its turn, the summary has what there is, and the end names those that failed."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "comparison.md").write_text("as it was\n")
    done = done_with(tmp_path, "staged", "dose-0.02", REGIMES="independent,nobody")
    assert done.returncode == 1
    assert done.stdout.startswith("== staged\n== dose-0.02\n")
    assert done.stderr.count("no such regime; got 'nobody'") == 2
    assert done.stderr.endswith("science: failed: staged dose-0.02\n")
    assert (tmp_path / "summary.md").read_text() == "# families\n\nas it was\n\n"
