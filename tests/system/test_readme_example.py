"""The README's own models and prompts, run: its three commands in its folder, with small models."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cli.main import main
from tests.support.own_example import write_example

pytestmark = pytest.mark.system
FEW = ["--run.steps", "2", "--policies.qwen.rollout.max_new_tokens", "8", "--policies.smol.rollout.max_new_tokens", "8"]


def test_the_three_commands_check_train_and_export(tmp_path, tiny_model, monkeypatch, capsys):
    """As they stand there but for fewer steps and shorter answers; the last one writes a model folder."""
    shown = write_example(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    check, train, export = (shlex.split(line, comments=True) for line in shown["commands"].splitlines())
    assert [words[:2] for words in (check, train, export)] == [["mrl", "check"], ["mrl", "train"], ["mrl", "export"]]
    assert main(check[1:]) == 0
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-m", *train, *FEW]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "qwen step 2/2" in done.stdout
    capsys.readouterr()
    assert main(export[1:]) == 0
    assert (Path(capsys.readouterr().out.split()[-1]) / "model.safetensors").exists()
