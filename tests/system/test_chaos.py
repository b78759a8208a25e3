"""A short form of `tools/chaos.py`: a real run whose processes are killed and stopped at random."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.system


def chaos(run, *arguments):
    """Runs the drill on a configuration; returns its exit code, the values of its rows by name, and what it said."""
    done = subprocess.run(
        [sys.executable, "tools/chaos.py", str(run.config), "--runs", str(run.folder.parent), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"] if done.stdout else []
    return done.returncode, {row["name"]: row["value"] for row in rows}, said


def test_a_run_ends_by_itself_whatever_is_killed(make_run):
    """Every role is hit about once; versions rise, nothing acknowledged is lost, slots are never in use twice."""
    code, rows, said = chaos(make_run(steps=40), "--minutes", "0.5", "--every", "3", "--unbroken", "0")

    assert code == 0, said
    assert rows["faults"] >= 5, said
    assert rows["processes left behind"] == 0
