"""A process that is to serve a kept version, and cannot: it ends with one line, and nothing of the run with it."""

import json

import pytest

from mrl.config.run_folder import RunFolder, create_run_folder
from mrl.models.probe import save_probe
from mrl.processes.evaluation import checkpoint_serving
from tests.support.evaluated_run import checkpoint
from tests.support.word_runs import word_run


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """One with a checkpoint of step 4."""
    save_probe(tmp_path / "model", seed=3)
    config = word_run({"qwen": {"model": str(tmp_path / "model")}}, run={"steps": 9, "folder": str(tmp_path)})
    folder = create_run_folder(config)
    checkpoint(folder, "qwen", tmp_path / "model", 4)
    return folder


def ending(run, step):
    """Exit code and reason."""
    code = checkpoint_serving.main(run.path, "qwen", step)
    return code, json.loads((run.crash / f"kept-version-qwen-{step}.json").read_text())["reason"]


def test_a_host_without_room_is_told_what_it_lacks(run, monkeypatch):
    """Before the weights are written or loaded: it would take the memory of the run."""
    monkeypatch.setattr(checkpoint_serving, "free_memory_bytes", lambda: 1000)
    monkeypatch.setattr(checkpoint_serving, "write_folder", lambda *_: pytest.fail("written"))
    code, reason = ending(run, 4)
    assert (code, reason.startswith("not enough memory to serve this version: it needs ")) == (1, True)
    assert reason.endswith("0 MiB are free on this host")


def test_a_checkpoint_that_is_gone_is_named(run):
    """The learner removed it meanwhile."""
    code, reason = ending(run, 8)
    assert code == 1
    assert "step_8" in reason
    assert not list((run.path / "kept_versions").iterdir())
