"""Whole runs of real processes: they learn, say so to a tracker, show nothing to others, survive losses, end cleanly,
and go on after anything."""

import os
import signal
import stat
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.metrics.rollout_files import read_rollouts, rollout_files

pytestmark = pytest.mark.system
POLICIES = ("qwen", "llama")


def test_reward_rises_and_peers_are_heard(finished):
    """Two policies train to the end: rewards rise, the weaker one is rescued, the report and all results exist."""
    run, _ = finished
    for policy in POLICIES:
        records = run.metrics(f"learner/{policy}")
        rewards = [record["values"]["reward/mean"] for record in records]
        assert [record["step"] for record in records] == list(range(1, 41))
        assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + (0.1 if policy == "qwen" else -0.1)
        assert sum(record["values"]["sharing/asked_prompts"] for record in records) > 0
        assert max(record["values"]["staleness/max_versions"] for record in records) <= 2
        assert max(record["values"]["weights/canary_max_abs_nats"] for record in run.metrics(f"worker/{policy}")) < 1e-4
        first, last = (run.result(policy, step) for step in (0, 40))
        assert (first["missing"], last["missing"], last["own_token_share"]) == (0, 0, 1.0)
        assert sum(task["prompts"] for task in last["per_task"].values()) == 64
    rescues = sum(record["values"]["sharing/rescues"] for record in run.metrics("learner/qwen"))
    assert rescues > 0
    kept = [row for path in rollout_files(run.folder / "rollouts", "qwen") for row in read_rollouts(path)]
    assert Counter(row["kind"] for row in kept) == {"rollout": 40 * 8 * 8, "rescue": rescues}
    assert {row["source"] for row in kept if row["kind"] == "rescue"} == {"llama"}
    page = (run.folder / "report.html").read_text()
    assert "trim" in page
    assert run.metrics("allocator")
    assert not run.left_over()


def test_a_run_of_one_host_opens_no_port_and_no_file_to_others(finished):
    """While it trains none of its processes listens at one; nothing that it leaves can be read by others."""
    run, listened = finished
    assert listened == []
    open_to_others = [path for path in (run.folder, *run.folder.rglob("*")) if is_open(path)]
    assert open_to_others == []
    assert list(run.temporary.iterdir()) == [], "a folder stayed behind"


def test_tensorboard_has_what_a_run_measured(finished):
    """Every value of every learner's step that is a finite number, at that step, and samples; nothing was lost."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = finished
    events = EventAccumulator(
        str(run.folder / "trackers" / "tensorboard" / "system"), size_guidance={"scalars": 0, "tensors": 0}
    )
    events.Reload()
    found = {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    for policy in ("qwen", "llama"):
        records = run.metrics(f"learner/{policy}")
        assert [record["step"] for record in records] == list(range(1, 41))
        for record in records:
            for name, value in record["values"].items():
                if value == value:
                    assert found[f"{policy}/{name}"][record["step"]] == pytest.approx(value, rel=1e-6), name
        shown = events.Tensors(f"{policy}/samples")
        assert [one.step for one in shown] == list(range(1, 41))
        rows = shown[0].tensor_proto.string_val[0].decode().splitlines()
        assert len(rows) == 2 + 2
        assert rows[2].startswith(f"| {policy} | 1 | ")
    assert any(tag.startswith("qwen/worker_0/") for tag in found)
    assert any(tag.startswith("run/") for tag in found)
    last = [
        record["values"] for record in run.metrics("supervisor") if "tracker/points/tensorboard" in record["values"]
    ]
    assert last[-1]["tracker/lost_points/tensorboard"] == 0.0
    assert "tracker tensorboard: tensorboard --logdir" in run.log.read_text()


def test_a_lost_worker_and_a_lost_exchange_are_replaced_and_ctrl_c_leaves_nothing(make_run):
    """Learners go on through both losses; Ctrl-C ends everything."""
    run = make_run(steps=100_000)
    run.start("--supervision.silence_s=600")
    run.until(lambda: all(run.step(policy) >= 2 for policy in POLICIES), "two steps of both policies")

    worker = run.pid("worker/qwen/0")
    os.kill(worker, signal.SIGKILL)
    replaced = run.until(lambda: run.pid("worker/qwen/0") not in (0, worker), "a new worker")
    step = run.step("qwen")
    run.until(lambda: run.step("qwen") >= step + 4, "steps with the new worker")

    exchange = run.pid("exchange")
    os.kill(exchange, signal.SIGSTOP)  # silent, but not long enough to be replaced
    steps = {policy: run.step(policy) for policy in POLICIES}
    run.until(lambda: all(run.step(p) >= steps[p] + 3 for p in POLICIES), "steps without the exchange")
    assert run.pid("exchange") == exchange
    assert psutil.Process(exchange).status() == psutil.STATUS_STOPPED
    os.kill(exchange, signal.SIGKILL)
    run.until(lambda: run.pid("exchange") not in (0, exchange), "a new exchange")
    run.children()

    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130
    assert replaced
    assert not run.left_over()


def test_sigterm_ends_a_run_and_leaves_nothing(make_run):
    """As a batch system ends a job: exit code 143, the report is there, no process is left."""
    run = make_run(steps=100_000)
    run.start()
    run.until(lambda: all(run.step(policy) >= 2 for policy in POLICIES), "two steps of both policies")
    run.children()

    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143
    assert "ended by SIGTERM" in run.log.read_text()
    assert (run.folder / "report.html").exists()
    assert not run.left_over()


def test_a_run_resumes_after_kill_nine_of_everything(make_run):
    """SIGKILL of the supervisor ends every process; --resume completes the run under a new epoch, versions rising."""
    run = make_run(steps=24)
    run.start()
    run.until(lambda: all(run.step(policy) >= 6 for policy in POLICIES), "six steps of both policies")
    run.children()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(120)
    psutil.wait_procs([psutil.Process(pid) for pid in run.left_over()], timeout=120)
    assert not run.left_over()
    told = {policy: len(run.metrics(f"learner/{policy}")) for policy in POLICIES}

    run.start("--resume")

    assert run.finish() == 0, run.tail()
    trained = {
        policy: [record["step"] for record in run.metrics(f"learner/{policy}")[told[policy] :]] for policy in POLICIES
    }
    assert any(trained.values()), "one of them may have been done before the other was at its sixth step"
    for policy, steps in trained.items():
        assert len(steps) <= 20, "it went on from a checkpoint, not from the start"
        assert steps == list(range(25 - len(steps), 25))
        assert (run.folder / "checkpoints" / policy / "run_epoch").read_text() == "1"


@pytest.mark.slow
def test_two_ranks_per_learner_train(make_run):
    """With nproc 2 both policies train over gloo; no group spans them."""
    run = make_run(steps=3, processes=2)
    run.start()

    assert run.finish() == 0, run.tail()
    assert [run.step(policy) for policy in POLICIES] == [3, 3]
    assert not run.left_over()


def is_open(path: Path) -> bool:
    return not path.is_symlink() and bool(stat.S_IMODE(path.stat().st_mode) & 0o077)
