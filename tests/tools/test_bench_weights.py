"""The benchmark of new weights: a tiny run of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
TINY = ["--rounds", "1", "--gigabytes", "0.08", "--million-parameters", "30", "--threads", "1"]
WITHOUT_PEFT = """
import runpy, sys

sys.modules["peft"] = None
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("bench_weights", run_name="__main__")
"""


@pytest.mark.thorough
def test_a_run_without_peft_says_so_and_ends_with_its_figures():
    """What needs no adapters is measured, the last line is JSON, and the exit code says that something is missing."""
    words = [sys.executable, "-c", WITHOUT_PEFT, TOOLS, *TINY]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)

    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("not measured from here on: learner.lora: the peft package is not installed")
    told = json.loads(lines[-1])
    assert told["bench"] == "weights"
    values = {row["name"]: row["value"] for row in told["rows"]}
    assert values["update and its proof"] > values["engine still"] > 0
    assert values["update by broadcast"] > values["embedded engine still"] > 0
    assert values["update by adapters alone"] is None
