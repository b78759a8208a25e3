"""Rendered scripts on a real SLURM: equal hosts, a requeue in mid-run, learners over two nodes, a heterogeneous job, a
job per policy."""

import os
from contextlib import suppress

import psutil
import pytest

from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.training_state import saved_weights

pytestmark = pytest.mark.system
POLICIES = ("qwen", "llama")


def steps_of(run, policy: str) -> list[int]:
    """Steps in the order in which they were trained, over all attempts."""
    return [record["step"] for record in run.metrics(f"learner/{policy}")]


def titled(title: str) -> list[psutil.Process]:
    """Processes of that name, on whichever node."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if f"mrl::{title}" in " ".join(process.cmdline()):
                found.append(process)
    return found


def below(title: str) -> set[str]:
    """Titles of all that the process of that name has started."""
    found = set()
    for process in titled(title):
        with suppress(psutil.Error):
            words = [" ".join(child.cmdline()) for child in process.children(recursive=True)]
            found |= {word.removeprefix("mrl::").split()[0] for word in words if word.startswith("mrl::")}
    return found


def test_a_run_on_two_nodes_completes(submit):
    """One supervisor per node; every policy lives on its own, and the first node has the run folder.

    A step that names no cores is bound to one here; the joined host has all that its job has, as far as they are there.
    """
    job = submit("--hosts", "2", steps=6)
    job.until(lambda: titled("supervisor/n2"), "a supervisor on the second node")
    assert set(titled("supervisor/n2")[0].cpu_affinity()) == os.sched_getaffinity(0)
    job.finish()

    run, nodes = job.run, job.cluster.job(job.jobs[0])["NodeList"]
    assert nodes == "n[1-2]"
    assert [steps_of(run, policy) for policy in POLICIES] == [list(range(1, 7))] * 2
    assert "host n2 has joined" in job.output()
    assert "exit code" not in (run.folder / "logs" / "latest" / "supervisor-n2.log").read_text()
    homes = {record["role"] for record in run.metrics("supervisor")}
    assert homes == {"supervisor", "supervisor/n2"}
    assert (run.folder / "report.html").exists()


def test_a_requeued_job_goes_on_where_it_was(submit):
    """`scontrol requeue` in mid-run, as preemption does: a second attempt resumes and the job completes."""
    job = submit("--hosts", "2", "--requeue", steps=12)
    run = job.run
    job.until(lambda: all(run.step(policy) >= 2 for policy in POLICIES), "two steps of both policies")

    job.cluster.run("scontrol", "requeue", job.jobs[0])
    job.finish()

    assert job.cluster.job(job.jobs[0])["Restarts"] == "1"
    assert "ended by SIGTERM" in job.output()
    assert sorted(path.name for path in (run.folder / "logs").glob("attempt_*")) == ["attempt_1", "attempt_2"]
    for policy in POLICIES:
        assert steps_of(run, policy) == list(range(1, 13)), "it went on from its last step"
        assert (run.folder / "checkpoints" / policy / "run_epoch").read_text() == "1"


OVER_NODES = [
    "--policies.qwen.learner.processes=4",
    "--policies.qwen.learner.hosts=2",
    "--policies.qwen.learner.sharding=shard",
    "--policies.qwen.learner.shard_size=4",
    "--policies.llama.learner.processes=2",
    "--policies.llama.learner.hosts=2",
]
"""All ranks of the first share one copy, so that all have a part of its checkpoints."""


@pytest.mark.slow
def test_learners_over_two_nodes(submit):
    """One job: `srun` starts the ranks on the second node, all meet and train, and all write their checkpoints.

    The first ranks of both learners live on a node each. The run ends with its last step.
    """
    job = submit("--hosts", "2", *OVER_NODES, steps=6)
    there = {"learner/qwen/rank2", "learner/qwen/rank3", "learner/llama"}
    job.until(lambda: there <= below("supervisor/n2"), "the ranks on the second node")
    assert not {"learner/qwen", "learner/qwen/rank1", "learner/llama/rank1"} & below("supervisor/n2")
    job.finish()

    assert [steps_of(job.run, policy) for policy in POLICIES] == [list(range(1, 7))] * 2
    for policy, writers in (("qwen", 4), ("llama", 1)):
        saved = job.run.folder / "checkpoints" / policy / "step_6"
        assert [path.name for path in sorted(saved.glob("rank_*"))] == [
            f"rank_{rank:05d}.safetensors" for rank in range(writers)
        ]
        found = CheckpointStore(saved.parent, policy).open(6)
        assert all(bool(tensor.isfinite().all()) for _, tensor in saved_weights(found))


@pytest.mark.slow
def test_a_heterogeneous_job_has_the_daemons_on_a_node_of_their_own(submit):
    """Policies live on the nodes of the second component, started through `srun --het-group=1`."""
    job = submit("--hosts", "3", "--heterogeneous", steps=4)
    job.finish()

    assert [steps_of(job.run, policy)[-1] for policy in POLICIES] == [4, 4]
    assert {record["role"] for record in job.run.metrics("supervisor")} == {
        "supervisor", "supervisor/n2", "supervisor/n3"
    }  # fmt: skip


@pytest.mark.slow
def test_separate_jobs_join_through_the_run_folder(submit):
    """One job per policy: the second finds the first by the run folder alone, and ends with it."""
    job = submit("--separate", steps=4)
    assert len(job.jobs) == 2
    job.finish()

    assert [steps_of(job.run, policy)[-1] for policy in POLICIES] == [4, 4]
    assert "host llama has joined" in job.output()
