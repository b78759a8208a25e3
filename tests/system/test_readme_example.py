"""The README's own models and prompts, run: its three commands in its folder, with small models."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_example import write_example

pytestmark = pytest.mark.system
FEW = ["--run.steps", "2", "--policies.qwen.rollout.max_new_tokens", "8", "--policies.smol.rollout.max_new_tokens", "8"]


def test_the_three_commands_check_train_and_export(tmp_path, tiny_model):
    """As they stand there but for fewer steps and shorter answers; the last one writes a model folder."""
    shown = write_example(tmp_path, tiny_model)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    said = []
    for line in shown["commands"].splitlines():
        name, *words = shlex.split(line, comments=True)
        assert name == "mrl"
        argv = [sys.executable, "-m", "mrl", *words, *(FEW if words[0] == "train" else [])]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    _, trained, exported = said
    assert "qwen step 2/2" in trained
    assert (Path(exported.split()[-1]) / "model.safetensors").exists()
