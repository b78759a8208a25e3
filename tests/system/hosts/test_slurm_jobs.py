"""Rendered scripts on a real SLURM: equal hosts, a requeue in mid-run, a heterogeneous job, a job per policy."""

import os
from contextlib import suppress

import psutil
import pytest

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
