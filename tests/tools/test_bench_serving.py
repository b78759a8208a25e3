"""The benchmark of requests outside of episodes: a tiny run of it, without vLLM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/bench_serving.py"


@pytest.mark.thorough
def test_a_tiny_run_ends_with_its_figures():
    """The same model samples in this process, and in a worker behind a gateway."""
    words = ["--ways", "embedded", "--layers", "1", "--rounds", "1", "--calls", "1"]
    done = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, timeout=240)

    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["bench"] == "serving"
    for alone, through in (told["rows"][:2], told["rows"][2:]):
        assert (through["against"], through["unit"]) == ("embedded engine alone", alone["unit"])
        assert through["ratio"] == pytest.approx(through["value"] / alone["value"])
        assert min(alone["value"], through["value"]) > 0
    assert [row["unit"] for row in told["rows"][1::2]] == ["tokens/s", "tokens/CPU s"]
