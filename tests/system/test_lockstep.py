"""Synchronous runs: equal seeds give equal bits, also across the loss of a learner and a resume."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

pytestmark = pytest.mark.system
POLICIES = ("qwen", "llama")
SYNC = ["--run.sync=true", "--run.sync_timeout_s=240"]
TIMED = ("time/", "rate/", "memory/", "exchange/lost_s", "groups/repeated", "groups/granted_again")
"""Names of what a clock, or a message that was sent twice, decides."""


def tensors_at(folder: Path, policy: str, step: int) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state of a checkpoint."""
    return safetensors.torch.load_file(folder / "checkpoints" / policy / f"step_{step}" / "rank_00000.safetensors")


def step_values(run, policy: str) -> dict[int, dict[str, float]]:
    """Step -> what its learner said about it, of the last life that trained it."""
    return {
        record["step"]: {name: value for name, value in record["values"].items() if not name.startswith(TIMED)}
        for record in run.metrics(f"learner/{policy}")
    }


def assert_equal_runs(run, other, steps: int) -> None:
    """Every metric of every step, and every parameter and moment at the end, bit for bit."""
    for policy in POLICIES:
        values, others = step_values(run, policy), step_values(other, policy)
        assert sorted(values) == sorted(others) == list(range(1, steps + 1))
        for step, found in values.items():
            assert found == others[step], f"{policy} step {step}"
        tensors, expected = tensors_at(run.folder, policy, steps), tensors_at(other.folder, policy, steps)
        assert tensors.keys() == expected.keys()
        assert [key for key, tensor in tensors.items() if not torch.equal(tensor, expected[key])] == []


HEARD = {
    "independent": "",
    "prp": "sharing/peer_rows",
    "xgrpo": "sharing/hit_prompts",
    "sgt": "sharing/asked_prompts",
    "hacpo": "sharing/peer_rows",
    "graft": "sharing/hit_prompts",
    "rlad": "sharing/scored_rows",
    "copd": "sharing/scored_rows",
}
"""Regime -> what counts that a peer was heard, or, in the first steps of sgt, asked. That of episodes alone is repeated
in `test_episodes`."""
STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize("regime", HEARD)
def test_equal_seeds_give_equal_bits_under_every_regime(make_run, regime):
    """Groups of a peer that learns too, their rewards, and its scores, given under the weights of the same step."""
    sharing = f'[sharing]\nregime = "{regime}"\n[sharing.copd]\nrl_steps = 1\n'
    runs = [make_run(steps=STEPS, name=name, more=sharing) for name in ("first", "second")]
    for run in runs:
        run.start(*SYNC)
    for run in runs:
        assert run.finish() == 0, run.tail()
    for policy in POLICIES if HEARD[regime] else ():
        assert sum(values[HEARD[regime]] for values in step_values(runs[0], policy).values()) > 0
    assert_equal_runs(*runs, STEPS)


def test_a_policy_that_is_only_slow_ends_no_run(make_run):
    """Its evaluation takes longer than the bound of the meeting at which its peer waits, whose own is long over.

    From its first held-out answer until its peer says to have waited for longer than the bound, its worker computes for
    some hundredths of a second in every two, by its own CPU time, which a busy machine does not shorten. It stands
    still for less than the bound.
    """
    run, bound_s = make_run(steps=2, name="slow"), 24.0
    run.start("--run.sync=true", f"--run.sync_timeout_s={bound_s}", "--pool.held_out_prompts=1800")
    run.until(lambda: has_answered_held_out(run, "llama"), "llama's first held-out answer")
    worker = psutil.Process(run.pid("worker/llama/0"))

    while run.process.poll() is None and waited_for_peers_s(run, "qwen") < bound_s + 2.0:
        worker.suspend()
        time.sleep(1.9)
        worker.resume()
        computes_for(worker, 0.03, at_most_s=5.0)

    assert run.finish() == 0, run.tail()
    assert waited_for_peers_s(run, "qwen") >= bound_s + 2.0
    assert max(record["values"]["time/wait_for_peers_s"] for record in run.metrics("learner/qwen")) > bound_s + 2.0
    assert {run.result(policy, step)["missing"] for policy in POLICIES for step in (0, 2)} == {0}


def waited_for_peers_s(run, policy: str) -> float:
    """How long the policy's learner has waited for its peers at one meeting, as the run's own lines say it."""
    said = re.findall(rf"\b{policy} \d+/\d+ awaiting step barrier from \S+ ([\d.]+)s of", run.log.read_text())
    return max(map(float, said), default=0.0)


def computes_for(process: psutil.Process, cpu_s: float, *, at_most_s: float) -> None:
    """Wait until a process has used so much CPU time, or, where it has nothing to do, for so long."""
    end_s, end_cpu_s = time.monotonic() + at_most_s, sum(process.cpu_times()[:2]) + cpu_s
    while time.monotonic() < end_s and sum(process.cpu_times()[:2]) < end_cpu_s:
        time.sleep(0.005)


def has_answered_held_out(run, policy: str) -> bool:
    """Whether a worker of the policy has begun with held-out prompts."""
    return any(record["values"].get("rollout/held_out_share", 0) > 0 for record in run.metrics(f"worker/{policy}"))


SKIPPING = ["--pool.train_prompts=24", "--pool.keep_solved=0.25", "--pool.keep_hopeless=0.25"]


@pytest.mark.parametrize(
    "options", [pytest.param([], marks=pytest.mark.slow), SKIPPING], ids=["every prompt", "skipping prompts"]
)
def test_equal_seeds_give_equal_bits_also_across_the_loss_of_a_learner(make_run, options):
    """A learner dies by SIGKILL, which ends its run by name; resumed, the run equals one that nothing happened to."""
    broken = make_run(steps=100_000, name="broken")
    broken.start(*SYNC, *options)
    broken.until(lambda: min(broken.step(policy) for policy in POLICIES) >= 5, "five steps of both policies")
    learner = broken.pid("learner/llama")
    assert learner, "the learner of llama is there"
    os.kill(learner, signal.SIGKILL)
    assert broken.finish() == 1, broken.tail()
    assert "learner/llama was killed by signal 9" in broken.tail()
    assert ", and a synchronous run can continue only from a common step" in broken.tail()
    steps = max(broken.step(policy) for policy in POLICIES) + 2
    broken.start(*SYNC, *options, f"--run.steps={steps}", "--resume")
    assert broken.finish() == 0, broken.tail()

    whole = make_run(steps=steps, name="whole")
    whole.start(*SYNC, *options)
    assert whole.finish() == 0, whole.tail()

    records = whole.metrics("learner/")
    assert {record["values"]["staleness/max_versions"] for record in records} == {0.0}
    assert sum(record["values"]["sharing/rescues"] for record in records) > 0
    skipped = sum(record["values"].get("curriculum/skipped_prompts", 0) for record in records)
    assert (skipped > 0) == bool(options)
    assert_equal_runs(broken, whole, steps)
