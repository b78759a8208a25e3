"""Learners and engines of two policies that have one device in turns."""

import os
import signal

import pytest

from mrl.metrics.jsonl import read_metrics
from tests.system.test_lockstep import POLICIES, SYNC, assert_equal_runs

pytestmark = pytest.mark.system
TURNS = [f"--policies.{name}.turns=true" for name in POLICIES]
STEPS = 6


def test_a_synchronous_run_has_the_same_bits_in_turns(make_run):
    """All four processes of both policies have the cores one after the other."""
    apart, in_turns = (make_run(steps=STEPS, name=name) for name in ("apart", "turns"))
    apart.start(*SYNC)
    in_turns.start(*SYNC, *TURNS)
    for run in (apart, in_turns):
        assert run.finish() == 0, run.tail()

    assert_equal_runs(apart, in_turns, STEPS)


def test_holders_that_are_killed_give_their_turn_to_the_others_and_the_run_goes_on(make_run):
    """Each policy at its own pace: a learner and a worker die by SIGKILL, and both policies come to their last step."""
    run = make_run(steps=40, name="killed")
    run.start(*TURNS)
    run.until(lambda: min(run.step(policy) for policy in POLICIES) >= 2, "both train")
    for role in ("learner/qwen", "worker/llama/0"):
        os.kill(run.pid(role), signal.SIGKILL)

    assert run.finish() == 0, run.tail()
    assert {policy: run.step(policy) for policy in POLICIES} == dict.fromkeys(POLICIES, 40)
    waits = {span["kind"] for line in read_metrics(run.folder / "metrics.jsonl") for span in line.get("spans", ())}
    assert "awaiting turn" in waits
