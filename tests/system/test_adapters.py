"""A whole run whose engines are given adapters alone: of a learner with one rank, and of one in shards."""

import os
import signal

import pytest

pytestmark = pytest.mark.system
POLICIES = ("qwen", "llama")
ADAPTERS = [
    word
    for policy in POLICIES
    for word in (f"--policies.{policy}.rollout.weights", "adapters", f"--policies.{policy}.learner.lora.rank", "4")
]
SHARDED = ["--policies.llama.learner.processes", "2", "--policies.llama.learner.sharding", "shard"]


@pytest.mark.slow
def test_workers_follow_by_adapters_also_those_that_are_started_anew(make_run):
    """Every version is proved whole and evaluated; no weights are written."""
    run = make_run(steps=12)
    run.start(*ADAPTERS, *SHARDED)
    run.until(lambda: run.step("qwen") >= 2, "two steps")
    worker = run.pid("worker/qwen/0")
    os.kill(worker, signal.SIGKILL)

    assert run.finish(300) == 0, run.tail()
    for policy in POLICIES:
        values = [record["values"] for record in run.metrics(f"worker/{policy}/0")]
        assert values[-1]["weights/by_adapters"] >= 2
        assert values[-1]["weights/by_files"] == values[-1]["weights/refused"] == 0
        assert values[-1]["rollout/engine_restarts"] == 0
        assert max(one["weights/canary_max_abs_nats"] for one in values) < 1e-4
        assert {one["weights/compared_share"] for one in values} == {1.0}
        assert (run.folder / "evaluation" / f"{policy}-12.json").exists()
        assert list((run.folder / "weights" / policy).glob("*/adapter_model.safetensors"))
        assert not list((run.folder / "weights" / policy).glob("*/model*.safetensors"))
    assert not run.left_over()
