"""`mrl eval` from the command to its file on the real servers: greedily they say what the embedded engine says."""

import json
from pathlib import Path

import psutil
import pytest

from mrl.cli.main import main
from mrl.config.load import validate
from mrl.config.run_folder import create_run_folder
from mrl.models.probe import save_probe
from tests.support.evaluated_run import checkpoint

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run of one policy with a checkpoint; no task is right by chance, for answers themselves are compared."""
    place = tmp_path_factory.mktemp("place")
    save_probe(place / "qwen", seed=3)
    tables = {
        "run": {"name": "r", "steps": 9, "folder": str(place / "runs")},
        "tasks": {"trim": {"source": "words", "dataset": "trim"}},
        "pool": {"train_prompts": 4, "held_out_prompts": NUM_PROMPTS},
        "policies": {"qwen": {"model": str(place / "qwen"), "rollout": {"max_new_tokens": 8}}},
    }
    folder = create_run_folder(validate(tables, where="test"))
    checkpoint(folder, "qwen", place / "qwen", 4)
    return place


def answers(place: Path, engine: str, capsys) -> list[tuple[str, str]]:
    """Prompt and answer of the held-out prompts that the file of an evaluation shows; all of them are answered."""
    out = place / f"{engine}.json"
    words = ["--temperature", "0", "--device", "cpu", "--engine", engine, "--out", str(out)]
    assert main(["eval", str(place / "runs/r"), *words]) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())["policies"]["qwen@4"]["result"]
    assert [one["answered"] for one in result["prompts"]] == [1] * NUM_PROMPTS
    return sorted((one["prompt"], one["completion"]) for one in result["answers"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_is_evaluated_by_a_server_that_is_gone_afterwards(place, capsys, engine):
    """All prompts are answered, with the words of the embedded engine; no process is left."""
    expected = answers(place, "embedded", capsys)
    assert len({answer for _, answer in expected}) > 1
    before = psutil.Process().children(recursive=True)
    assert answers(place, engine, capsys) == expected
    assert [one for one in psutil.Process().children(recursive=True) if one not in before] == []
