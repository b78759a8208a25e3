"""Two policies learn from nothing but what they agree on, in a whole run."""

import pytest

from mrl.metrics.rollout_files import read_rollouts, rollout_files

STEPS = 6
VOTED = """
[sharing.collective]
peer_wait_s = 60
peer_hold_versions = 2
"""


@pytest.mark.system
def test_rewards_come_of_the_vote_and_accuracy_of_the_labels(make_run):
    """Each policy goes its own pace: most groups have every vote, rewards are 0 and 1 by it, and held-out answers are
    judged by the data set."""
    run = make_run(steps=STEPS, more=VOTED)
    voted = [f"--tasks.{task}.verifier=collective" for task in ("trim", "letter_counting")]
    run.start(*voted, "--pool.held_out_prompts=64", "--sharing.regime=xgrpo")

    assert run.finish() == 0, run.tail()
    for policy, peer in (("qwen", "llama"), ("llama", "qwen")):
        values = [record["values"] for record in run.metrics(f"learner/{policy}")]
        assert len(values) == STEPS
        assert min(one["vote/complete_share"] for one in values) >= 0.5
        assert values[-1][f"sharing/hit_rate_from/{peer}"] > 0.5
        assert all(0 < one["vote/self_consistency"] <= 1 for one in values)
        assert any(0 < one["reward/mean"] < 1 for one in values)
        first, last = (run.result(policy, step) for step in (0, STEPS))
        assert (first["missing"], last["missing"]) == (0, 0)
        assert 0 < first["accuracy"] < 1
    kept = [row for path in rollout_files(run.folder / "rollouts", "qwen") for row in read_rollouts(path)]
    assert {row["reward"] for row in kept} == {0.0, 1.0}
    assert not run.left_over()
