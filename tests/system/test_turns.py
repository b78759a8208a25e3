"""Learners and engines of two policies that have one device in turns."""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from mrl.allocation.device_turn import DeviceTurn
from mrl.metrics.timeline import read_timeline
from tests.system.test_lockstep import POLICIES, SYNC, assert_equal_runs

pytestmark = pytest.mark.system
TURNS = [f"--policies.{name}.turns=true" for name in POLICIES]
STEPS = 6
UNITS = ["cpu:0", "cpu:1"]
ROUNDED_S = 0.01
"""By which the ends of spans of two processes may be off."""


def test_a_synchronous_run_has_the_same_bits_in_turns(make_run):
    """All four processes of both policies have the cores one after the other."""
    apart, in_turns = (make_run(steps=STEPS, name=name) for name in ("apart", "turns"))
    apart.start(*SYNC)
    in_turns.start(*SYNC, *TURNS)
    for run in (apart, in_turns):
        assert run.finish() == 0, run.tail()

    assert_equal_runs(apart, in_turns, STEPS)


def test_holders_that_are_killed_give_their_turn_to_the_others_and_the_run_goes_on(make_run):
    """Each policy at its own pace: a learner and a worker die by SIGKILL, and both policies come to their last step.

    No two learners ever train at one time.
    """
    run = make_run(steps=16, name="killed")
    run.start(*TURNS)
    run.until(lambda: min(run.step(policy) for policy in POLICIES) >= 2, "both train")
    for role in ("learner/qwen", "worker/llama/0"):
        os.kill(run.pid(role), signal.SIGKILL)

    assert run.finish() == 0, run.tail()
    assert {policy: run.step(policy) for policy in POLICIES} == dict.fromkeys(POLICIES, 16)
    spans = [span for span in read_timeline(run.folder / "timeline.jsonl") if not span.is_beside]
    assert {span.whom for span in spans if span.kind == "awaiting device turn"} >= {"learner/qwen", "worker/llama/0"}
    training = sorted((one.began_unix_s, one.duration_s) for one in spans if one.kind in ("training", "publishing"))
    assert all(began_s + lasted_s < next_s + ROUNDED_S for (began_s, lasted_s), (next_s, _) in pairwise(training))


def test_engines_on_leased_units_have_them_in_turns_with_learners(make_run):
    """An engine has the cores of its unit in turns, and a learner those of all units.

    One is killed while somebody else has the turn: its policy gets a unit again, where the next engine awaits it.
    """
    run = make_run(steps=16, name="units")
    run.start(*TURNS, f"--allocation.units={json.dumps(UNITS)}", "--allocation.period_s=2")
    run.until(lambda: min(run.step(policy) for policy in POLICIES) >= 2, "both train")
    (queue,) = run.temporary.rglob("turns")
    turn = DeviceTurn(queue, "test", ["core 0", "core 1"])
    run.until(lambda: turn.ask() is None, "the turn")
    (killed,) = (name for name in run.titles() if name.startswith("worker/qwen"))
    before = _leases(run, "qwen", "active")
    os.kill(run.pid(killed), signal.SIGKILL)
    dead = _places(queue, "worker/qwen")
    run.until(lambda: _places(queue, "worker/qwen") - dead, "an engine that awaits its first turn")
    assert _leases(run, "qwen", "granted") > before == _leases(run, "qwen", "active")
    turn.give_back()

    assert run.finish() == 0, run.tail()
    assert {policy: run.step(policy) for policy in POLICIES} == dict.fromkeys(POLICIES, 16)
    assert _leases(run, "qwen", "active") > before
    spans = [span for span in read_timeline(run.folder / "timeline.jsonl") if not span.is_beside]
    waited = {span.whom for span in spans if span.kind == "awaiting device turn"}
    assert waited >= {"learner/qwen", "learner/llama"}
    assert any(whom.startswith("worker/") for whom in waited)
    training = sorted((one.began_unix_s, one.duration_s) for one in spans if one.kind in ("training", "publishing"))
    assert all(began_s + lasted_s < next_s + ROUNDED_S for (began_s, lasted_s), (next_s, _) in pairwise(training))


def _places(queue: Path, role: str) -> set[str]:
    """Numbers in the queue that such a role has, or had when it died."""
    return {place.name for place in queue.glob("0*") if role in place.read_text()}


def _leases(run, policy: str, state: str) -> set[int]:
    """Epochs of a policy's leases that came to a state."""
    rows = map(json.loads, (run.folder / "units.jsonl").read_text().splitlines())
    return {row["epoch"] for row in rows if (row["policy"], row["state"]) == (policy, state)}
