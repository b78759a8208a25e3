"""`mrl stop` on a real run: one policy, then all; every step that was trained is saved, and none is trained twice."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.system
POLICIES = ("qwen", "llama")


def stop(run, *words: str) -> str:
    """Run `mrl stop`; returns what it says."""
    argv = [sys.executable, "-m", "mrl", "stop", str(run.folder), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout


def slots_of(run, policy: str) -> float:
    """What the allocator gave a policy last."""
    records = [record for record in run.metrics("allocator") if record["policy"] == policy]
    return records[-1]["values"]["allocation/slots"]


def test_a_run_is_stopped_by_parts_and_goes_on_from_its_last_steps(make_run):
    """The other policy goes on; exit code and last line say who ended the run; --resume continues with both."""
    run = make_run(steps=200)
    run.start()
    run.until(lambda: all(run.step(policy) >= 3 for policy in POLICIES), "three steps of both policies")

    assert "llama has ended" in stop(run, "--policy", "llama", "--wait")
    step = run.step("qwen")
    assert (run.pid("learner/llama"), run.pid("worker/llama/0")) == (0, 0)
    run.until(lambda: slots_of(run, "llama") == 0, "the slots of llama in other hands")
    run.until(lambda: run.step("qwen") >= step + 2, "steps of qwen alone")
    stop(run, "--wait")

    assert run.finish() == 3
    assert "mrl: stopped by " in run.log.read_text().splitlines()[-1]
    reached = {policy: run.step(policy) for policy in POLICIES}
    run.start("--resume", "--run.steps", str(max(reached.values()) + 2))
    assert run.finish() == 0, run.tail()
    for policy in POLICIES:
        steps = [record["step"] for record in run.metrics(f"learner/{policy}")]
        assert steps == list(range(1, max(reached.values()) + 3)), "no step is lost, none is trained twice"
        assert (run.folder / "checkpoints" / policy / "run_epoch").read_text() == "1"
    assert not run.left_over()
