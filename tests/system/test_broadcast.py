"""Whole runs whose weights go by broadcast: members die and hang, and nobody waits for them without a bound."""

import os
import signal

import pytest

pytestmark = pytest.mark.system
POLICIES = ("qwen", "llama")
BROADCAST = [word for policy in POLICIES for word in (f"--policies.{policy}.rollout.weights", "broadcast")]
TWO_WORKERS = ["--policies.qwen.rollout.workers", "2"]
SHARDED = ["--policies.llama.learner.processes", "2", "--policies.llama.learner.sharding", "shard"]


def newest(run, role: str, name: str) -> float:
    """The last value of a metric that a role told."""
    values = [record["values"][name] for record in run.metrics(role) if name in record["values"]]
    return values[-1] if values else 0.0


def test_versions_go_by_broadcast_and_the_last_one_alone_as_files(make_run):
    """Two workers on one learner, and a learner whose two ranks hold half of the weights each."""
    run = make_run(steps=8)
    run.start(*BROADCAST, *TWO_WORKERS, *SHARDED)

    assert run.finish(300) == 0, run.tail()
    for policy, workers in (("qwen", 2), ("llama", 1)):
        names = [f"worker/{policy}/{number}" for number in range(workers)]
        # Who of two workers gets most of the work is open, and one without work tells nothing of its updates.
        assert max(newest(run, name, "weights/by_broadcast") for name in names) >= 2
        assert all(newest(run, name, "weights/by_files") <= 1 for name in names)
        canaries = [record["values"]["weights/canary_max_abs_nats"] for name in names for record in run.metrics(name)]
        assert max(canaries) < 1e-4
        assert (run.folder / "evaluation" / f"{policy}-8.json").exists()
        written = [path.parent.name for path in (run.folder / "weights" / policy).glob("*/model.safetensors")]
        assert written == ["0.8"]
    assert not run.left_over()


@pytest.mark.slow
def test_a_worker_that_dies_a_worker_that_hangs_and_a_learner_that_dies_are_outlived(make_run):
    """Each time the others go on; who comes back follows by broadcast again; Ctrl-C leaves nothing."""
    run = make_run(steps=100_000)
    run.start(*BROADCAST, *TWO_WORKERS)
    run.until(lambda: all(run.step(policy) >= 3 for policy in POLICIES), "three steps of both")

    worker = run.pid("worker/qwen/0")
    os.kill(worker, signal.SIGKILL)
    run.until(lambda: run.pid("worker/qwen/0") not in (0, worker), "a new worker")
    told = len(run.metrics("worker/qwen/0"))
    run.until(lambda: len(run.metrics("worker/qwen/0")) > told + 1, "groups of the new worker")
    assert newest(run, "worker/qwen/0", "weights/by_broadcast") >= 1

    hanging, step = run.pid("worker/qwen/1"), run.step("qwen")
    os.kill(hanging, signal.SIGSTOP)
    run.until(lambda: run.step("qwen") >= step + 4, "steps without the second worker")
    os.kill(hanging, signal.SIGCONT)

    learner, step = run.pid("learner/llama"), run.step("llama")
    os.kill(learner, signal.SIGKILL)
    run.until(lambda: run.pid("learner/llama") not in (0, learner), "a new learner")
    run.until(lambda: run.step("llama") >= step + 3, "steps of the new learner")
    run.children()

    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130
    assert not run.left_over()
