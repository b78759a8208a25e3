"""Whole runs that train on own groups again, under sgt, which goes on to rescue failures beside that."""

from collections import Counter

import pytest

from mrl.metrics.rollout_files import read_rollouts, rollout_files
from tests.system.test_lockstep import POLICIES, SYNC, assert_equal_runs, step_values

pytestmark = pytest.mark.system
REUSE = [
    *(f"--policies.{policy}.learner.reuse_share=0.5" for policy in POLICIES),
    *(f"--policies.{policy}.learner.max_staleness_versions=3" for policy in POLICIES),
]


def test_an_asynchronous_run_trains_on_half_as_many_answers(make_run):
    """From the second step on each step has four fresh groups and up to four earlier ones, none too stale or lost.

    There are fewer where groups come late, as on a busy machine.
    """
    run = make_run(steps=8)
    run.start(*REUSE)

    assert run.finish() == 0, run.tail()

    for policy in POLICIES:
        values = [record["values"] for record in run.metrics(f"learner/{policy}")]
        first, *later = (told["groups/reused"] for told in values)
        assert (first, len(later)) == (0, 7)
        assert max(later) == 4
        assert 1 <= max(told["staleness/max_versions"] for told in values) <= 3
        assert sum(told["staleness/dropped_groups"] for told in values) == 0
        assert sum(told["sharing/asked_prompts"] for told in values) <= 8 * 4 + 3 * 4, "a reused group asks no peer"
        kept = [row for path in rollout_files(run.folder / "rollouts", policy) for row in read_rollouts(path)]
        assert Counter(row["kind"] for row in kept)["rollout"] == 8 * 4 * 8, "each answer stands there once"


@pytest.mark.slow
def test_a_synchronous_run_is_the_same_to_the_bit_when_it_is_resumed(make_run):
    """What may be drawn again, and how often, is in the checkpoint, and so is the generator that draws."""
    broken = make_run(steps=3, name="broken")
    broken.start(*SYNC, *REUSE)
    whole = make_run(steps=6, name="whole")
    whole.start(*SYNC, *REUSE)
    assert broken.finish() == 0, broken.tail()
    broken.start(*SYNC, *REUSE, "--run.steps=6", "--resume")
    for run in (broken, whole):
        assert run.finish() == 0, run.tail()

    for policy in POLICIES:
        values = step_values(whole, policy)
        assert [values[step]["groups/reused"] for step in range(1, 7)] == [0] + 5 * [4]
        assert values[2]["staleness/max_versions"] == 1, "the fresh groups of a synchronous step are of its version"
    assert_equal_runs(broken, whole, 6)
