"""The benchmark of the gateway: a tiny run of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/bench_gateway.py"


@pytest.mark.thorough
def test_a_tiny_run_ends_with_its_figures():
    """Agents and environments play as many episodes, and both servers answer."""
    words = ["--rounds", "1", "--groups", "2", "--calls", "64"]
    done = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, timeout=240)

    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["bench"] == "gateway"
    values = {row["name"]: row["value"] for row in told["rows"]}
    assert values["agent: CPU"] > values["environment: CPU"] > 0
    assert values["gateway, 1 at once: an answer"] > values["bare server, 1 at once: an answer"] > 0
