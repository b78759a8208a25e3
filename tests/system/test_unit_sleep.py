"""Engines that sleep on their unit and are woken, with whole runs of real processes: one unit, two policies.

Who has the unit is decided by which learner is stopped: a policy whose learner says nothing lends its units.
"""

import json
import os
import signal

import psutil
import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

OPTIONS = {
    "allocation.units": '["cpu:0"]', "allocation.floor_units": "0", "allocation.slots": "16",
    "allocation.hung_s": "4", "allocation.period_s": "0.5", "allocation.switching_share": "1.0",
    "allocation.grace_s": "20", "supervision.silence_s": "600", "policies.qwen.learner.data_timeout_s": "600",
    "policies.llama.learner.data_timeout_s": "600",
}  # fmt: skip


class Unit:
    """The one unit of a run."""

    def __init__(self, run, residency: str, *words: str) -> None:
        self.run = run
        run.start(
            "--allocation.residency",
            residency,
            *words,
            *(word for item in OPTIONS.items() for word in ("--" + item[0], item[1])),
        )

    def rows(self) -> list[dict]:
        path = self.run.folder / "units.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def owner(self) -> str:
        """Whose engine speaks, or nobody's."""
        newest = self.rows()[-1:]
        return newest[0]["policy"] if newest and newest[0]["state"] == "active" else ""

    def worker(self, policy: str) -> psutil.Process | None:
        pid = self.run.pid(f"worker/{policy}/0")
        return psutil.Process(pid) if pid else None

    def give_to(self, policy: str) -> float:
        """Stop the other learner; seconds from the unit's first move to the word of this policy's engine."""
        other = "llama" if policy == "qwen" else "qwen"
        before = len(self.rows())
        os.kill(self.run.pid(f"learner/{policy}"), signal.SIGCONT)
        os.kill(self.run.pid(f"learner/{other}"), signal.SIGSTOP)
        self.run.until(lambda: self.owner() == policy, f"the unit is {policy}'s", 120)
        step = self.run.step(policy)
        self.run.until(lambda: self.run.step(policy) >= step + 2, f"{policy} trains on what it samples", 120)
        fresh = self.rows()[before:]
        drained_s = next(row["time_unix_s"] for row in fresh if row["state"] == "draining")
        spoke_s = next(row["time_unix_s"] for row in fresh if row["state"] == "active")
        return spoke_s - drained_s

    def begin(self) -> None:
        """qwen's, with both learners there."""
        self.run.until(
            lambda: self.owner() and self.run.pid("learner/llama") and self.run.pid("learner/qwen"), "a start", 180
        )
        first = self.owner()
        self.run.until(lambda: self.run.step(first) >= 1, "a step", 120)
        if first != "qwen":
            self.give_to("qwen")


def is_stopped(process: psutil.Process | None) -> bool:
    return process is not None and process.status() == psutil.STATUS_STOPPED


@pytest.mark.slow
def test_seconds_of_a_move_by_stop_and_start(make_run) -> None:
    """What sleeping is compared with."""
    unit = Unit(make_run(steps=100_000, more=""), "stop")
    unit.begin()
    print("stop and start:", [round(unit.give_to(policy), 2) for policy in ("llama", "qwen", "llama")])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_sleeps_beside_its_worker(make_run, engine) -> None:
    """All its processes stand still while the unit is another policy's, and sample the newest weights afterwards."""
    words = ["--policies.qwen.rollout.engine", engine, "--policies.qwen.make.num_heads", "2"]  # vLLM: heads of 32
    unit = Unit(run := make_run(steps=100_000, more=""), "sleep", *words)
    unit.begin()
    worker = unit.worker("qwen")
    assert worker is not None
    server = worker.children(recursive=True)
    assert server

    unit.give_to("llama")
    assert all(is_stopped(process) for process in server)
    seconds = unit.give_to("qwen")

    print(f"{engine} on a unit, woken after {seconds:.2f} s")
    assert unit.worker("qwen") == worker
    assert not any(is_stopped(process) for process in server)
    told = run.metrics("worker/qwen")
    assert max(record["values"]["weights/canary_max_abs_nats"] for record in told) < 1e-4
    assert told[-1]["values"]["rollout/engine_restarts"] == 0
    os.kill(run.process.pid, signal.SIGINT)
    run.process.wait(60)
    assert not run.left_over()


def test_an_engine_sleeps_where_it_is_and_is_woken_under_the_newest_weights(make_run) -> None:
    """Back and forth in the same processes.

    One that was killed in its sleep is started anew; no sleeper survives its node.
    """
    unit = Unit(run := make_run(steps=100_000, more=""), "sleep")
    unit.begin()
    first = unit.worker("qwen")
    cold_s = unit.give_to("llama")
    assert is_stopped(unit.worker("qwen"))
    assert unit.worker("qwen") == first

    seconds = [unit.give_to("qwen")]
    assert unit.worker("qwen") == first
    assert not is_stopped(first)
    assert is_stopped(unit.worker("llama"))
    second = unit.worker("llama")
    seconds.append(unit.give_to("llama"))
    assert unit.worker("llama") == second
    print(f"cold start {cold_s:.2f} s, woken", [round(one, 2) for one in seconds])
    epochs = [row["epoch"] for row in unit.rows() if row["state"] == "granted"]
    assert epochs == sorted(set(epochs))
    for policy in ("qwen", "llama"):
        assert max(record["values"]["weights/canary_max_abs_nats"] for record in run.metrics(f"worker/{policy}")) < 1e-4

    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    unit.give_to("qwen")
    assert unit.worker("qwen") not in (None, first)
    counts = run.metrics("allocator")[-1]["values"]
    told = [record["values"] for record in run.metrics("allocator") if "allocation/woken" in record["values"]]
    assert told[-1]["allocation/woken"] >= 2, counts  # more where the unit went to and fro while both learners spoke
    assert (told[-1]["allocation/failed_sleeps"], told[-1]["allocation/failed_wakes"]) == (0, 0), counts

    run.children()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(5)
    psutil.wait_procs([psutil.Process(pid) for pid in run.left_over()], timeout=10)
    assert not run.left_over()
