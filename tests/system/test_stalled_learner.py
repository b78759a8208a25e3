"""A learner of which one rank no longer comes to what the others wait in."""

import os
import signal

import pytest

from tests.support.calm_steps import calm_steps
from tests.system.conftest import keep_qwen

pytestmark = pytest.mark.system
BOUND_S = 6.0


def test_a_stopped_rank_is_named_and_the_learner_goes_on_without_a_person(make_run):
    """The other rank ends within the bound, says in what it waited and for whom, and leaves its stacks.

    torchrun ends the stopped one, and the learner starts again from its checkpoint.
    """
    run = make_run(steps=100_000, processes=2)
    keep_qwen(run.config)
    words = [f"--policies.qwen.learner.collective_timeout_s={BOUND_S}", "--run.max_minutes=10"]
    run.start(*words, *calm_steps(run.config))
    run.until(lambda: run.step("qwen") >= 2, "two steps of qwen")
    pids = run.titles()
    waiting, stopped = pids["learner/qwen"], pids["learner/qwen/rank1"]
    os.kill(stopped, signal.SIGSTOP)
    log = run.folder / "logs" / "latest" / "learner-qwen.log"
    line = run.until(
        lambda: next((line for line in log.read_text().splitlines() if " for rank 1 (in " in line), ""),
        "a line that names the rank",
        timeout_s=120.0,
    )
    assert any(
        f" in '{what}' for rank 1" in line for what in ("gradient all-reduce", "broadcasting the step", "forward")
    )
    assert "its process has not run for" in line
    assert "crash/stacks" in line
    run.until(lambda: not os.path.exists(f"/proc/{waiting}"), "the end of the rank that waited")
    stacks = (run.folder / "crash" / "stacks" / "learner-qwen.txt").read_text()
    assert "all_reduce" in stacks or "broadcast" in stacks, stacks[:2000]
    before = run.step("qwen")
    run.until(lambda: log.read_text().count('"training started"') >= 3, "another life of the learner")
    run.until(lambda: run.step("qwen") > before, "a step of that life")
