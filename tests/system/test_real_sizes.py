"""Policies of released shapes go through a whole run on this machine, alone and beside processes that only compute."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "real_sizes.py"

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("num_busy", [0, 2])
def test_a_run_of_released_shapes_goes_its_whole_way_within_the_plan(tmp_path: Path, num_busy: int) -> None:
    argv = [sys.executable, str(TOOL), "--folder", str(tmp_path), "--busy", str(num_busy)]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    print(done.stdout[-8000:], done.stderr[-4000:])
    assert done.returncode == 0, [row for row in json.loads(done.stdout.splitlines()[-1])["rows"] if not row["ok"]]
