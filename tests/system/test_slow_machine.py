"""A machine on which one forward of the engine takes longer than a lease lives: the run gets on, and loses nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.parent_death import command

pytestmark = pytest.mark.system
SLOW_ENGINE = """
import importlib.abc, importlib.util, sys, time

class SlowForwards(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mrl.engines.continuous":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            step = module.ContinuousBatch.step
            def slow(batch):
                end_s = time.monotonic() + FORWARD_S
                left, right = module.torch.ones(700, 700), module.torch.ones(700, 700)
                while time.monotonic() < end_s:
                    left @ right
                return step(batch)
            module.ContinuousBatch.step = slow
        spec.loader.exec_module = exec_module
        return spec

if any("worker" in word for word in sys.orig_argv):  # or what workers are forks of
    sys.meta_path.insert(0, SlowForwards())
"""
FORWARD_S, TTL_S, DATA_TIMEOUT_S = 6.0, 4.0, 15.0
"""A batch has four forwards at least, which is longer than a learner waits for a worker that does not get on."""


@pytest.fixture
def busy() -> Iterator[None]:
    """Two processes that compute, beside all of the run's."""
    loops = [subprocess.Popen(command(os.getpid(), [sys.executable, "-c", "while True: pass"])) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def events(folder: Path) -> list[str]:
    """What the workers and learners said, by the names of their lines."""
    lines = [line for log in (folder / "logs" / "latest").glob("*.log") for line in log.read_text().splitlines()]
    return [json.loads(line)["event"] for line in lines if line.startswith("{") and line.endswith("}")]


@pytest.mark.slow
def test_a_run_on_a_slow_machine_gets_on(make_run, busy, tmp_path, monkeypatch):
    """No lease is lost and no process starts twice, though no batch comes within the learners' patience."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_ENGINE.replace("FORWARD_S", str(FORWARD_S)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "slow"), str(Path(__file__).parents[2])]))
    run = make_run(steps=1)
    patience = [f"--policies.{name}.learner.data_timeout_s={DATA_TIMEOUT_S}" for name in ("qwen", "llama")]
    short = [f"--policies.{name}.rollout.max_new_tokens=4" for name in ("qwen", "llama")]
    run.start(*patience, *short, f"--allocation.ttl_s={TTL_S}")

    assert run.finish(timeout_s=800.0) == 0, run.tail()

    assert "starts again" not in run.log.read_text()
    assert "lease expired while this process was not running" not in events(run.folder)
    waits = [record["values"]["time/wait_for_groups_s"] for record in run.metrics("learner/") if record["step"] == 1]
    assert all(wait_s > DATA_TIMEOUT_S for wait_s in waits), waits
    assert len(waits) == 2
