"""Batch scripts: what they ask for, what they run, and that bash runs them as meant."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.processes.planning.slurm import Job, SlurmRequest, render
from tests.support.word_runs import word_run

REQUEST = SlurmRequest(num_hosts=2, cpus_per_host=12, minutes=90)


def config_of(folder: str = "runs", **policies: dict[str, Any]) -> RunConfig:
    return word_run(policies, run={"folder": folder}, exchange={"host": "0.0.0.0"})


TWO = config_of(a={"learner": {"threads": 8}}, b={})


def rendered(config: RunConfig = TWO, *overrides: str, **changes: Any) -> list[Job]:
    jobs = render(config, Path("/c.toml"), replace(REQUEST, **changes), overrides)
    return [job._replace(script=job.script.replace(sys.executable, "py")) for job in jobs]


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_equal_hosts_make_one_job_that_launches_on_the_first() -> None:
    """Overrides are quoted; USR1 comes early enough to save and end."""
    (job,) = rendered(TWO, "--run.name=my run", partition="gpu", gpus_per_host=2)
    assert directives(job.script) == [
        "--job-name=mrl-r", "--time=90", "--signal=B:USR1@65", "--open-mode=append", "--no-requeue", "--partition=gpu",
        "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=12", "--gpus-per-node=2",
    ]  # fmt: skip
    assert "py -m mrl launch /c.toml '--run.name=my run' --hosts \"$hosts\"" in job.script
    assert 'requeue "$SLURM' not in job.script


def with_units(*units: str) -> RunConfig:
    return TWO.model_copy(update={"allocation": TWO.allocation.model_copy(update={"units": list(units)})})


@pytest.mark.parametrize("shape", ["equal", "heterogeneous"])
def test_units_of_hosts_that_slurm_has_yet_to_choose_are_refused(shape: str) -> None:
    """Also under the names that stand in for them here, which no host of the job will have."""
    told = r"/c.toml: allocation.units: the hosts .* got '{}'; .* cure: use --separate, .* policy: a/cpu:0, b/"
    for units in (("n1/cpu:0", "n2/cpu:0"), ("host-0/cpu:0", "host-1/cpu:0")):
        with pytest.raises(ConfigError, match=told.format(units[0])):
            rendered(with_units(*units), shape=shape)
    assert len(rendered(with_units("cpu:0", "cpu:1"), shape=shape)) == 1


def test_separate_jobs_have_units_under_the_names_of_their_policies() -> None:
    """As the cure says; the job that joins is that of the second."""
    run, join = rendered(with_units("a/cpu:0", "b/cpu:0"), shape="separate")
    assert '--hosts "$hosts"' in run.script
    assert "hosts=a,b" in run.script
    assert "--host b" in join.script


def test_a_heterogeneous_job_has_a_component_for_the_daemons() -> None:
    """The first has the CPUs that the daemons need and no GPU; commands go to the second component."""
    config = config_of(a={"device": "cuda"}, b={"device": "cuda"})
    (job,) = rendered(config, shape="heterogeneous", num_hosts=3, gpus_per_host=2, partition="gpu")
    said = directives(job.script)
    first, second = said[: said.index("hetjob")], said[said.index("hetjob") + 1 :]
    assert {"--nodes=1", "--cpus-per-task=2", "--partition=gpu"} <= set(first)
    assert not any("gpus" in word for word in first)
    assert second == ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=12", "--gpus-per-node=2", "--partition=gpu"]
    assert "$SLURM_JOB_NODELIST_HET_GROUP_0" in job.script
    assert '--launch.remote \'["srun", "--het-group=1", "--nodes=1"' in job.script
    assert "--launch.policies_on_first_host false" in job.script


def test_separate_jobs_join_through_the_run_folder() -> None:
    """One job per policy, called as it; the first is the run's own."""
    run, join = rendered(shape="separate", num_hosts=1, requeue=True)
    assert (run.title, join.title) == ("run", "b")
    assert "hosts=a,b\n" in run.script
    assert "--launch.hosts_join true" in run.script
    assert f"py -m mrl join {Path('runs/r').absolute()} --host b" in join.script
    assert '"$code" -eq 75 ]; then scontrol requeue' in join.script


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"cpus_per_host": 8}, "too few CPUs per host; got 8; wanted >= 11"),
        ({"minutes": 1}, "--minutes: too short"),
        ({"shape": "heterogeneous", "num_hosts": 1}, "--heterogeneous needs one host"),
        ({"shape": "separate", "num_hosts": 3}, "--separate makes one job per policy"),
        ({"num_hosts": 7}, "--hosts: some hosts have nothing to run; got 'host-4, host-5, host-6'"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], part: str) -> None:
    """Sizes and shapes that contradict each other or the run."""
    with pytest.raises(ConfigError, match=part):
        rendered(**changes)


def test_policies_that_need_gpus_are_refused_without() -> None:
    """On whichever host they would live."""
    with pytest.raises(ConfigError, match=r"policies.b.device: no GPU is visible on this host"):
        rendered(config_of(a={}, b={"device": "cuda"}))


def stand_ins(folder: Path, mrl: str) -> dict[str, str]:
    """Programs that write down how they were called, in place of python and SLURM's."""
    programs = {
        "py": mrl,
        "scontrol": 'if [ "$1" = show ]; then printf "h0\\nh1\\n"; else echo "scontrol $*" >>log; fi',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "h[0-1]", "SLURM_JOB_ID": "7"}


def test_bash_runs_the_script_and_hands_its_exit_code_on(tmp_path: Path) -> None:
    """The first start begins as asked; a restart goes on where the run was, if there was one."""
    environment = stand_ins(tmp_path, 'echo "$@" >>log; exit 5')
    (job,) = rendered(config_of(str(tmp_path), a={}, b={}), requeue=True, begin="--clean")
    for restarts in ("0", "1", "2"):
        if restarts == "2":
            (tmp_path / "r").mkdir()
            (tmp_path / "r" / "config.json").touch()
        environment["SLURM_RESTART_COUNT"] = restarts
        assert subprocess.run(["bash", "-c", job.script], cwd=tmp_path, env=environment, check=False).returncode == 5
    called = "-m mrl launch /c.toml --hosts h0,h1"
    assert (tmp_path / "log").read_text().splitlines() == [
        f"{called} --clean",
        f"{called} --clean",
        f"{called} --resume",
    ]


@pytest.mark.parametrize(
    ("number", "requeue", "code", "asked"),
    [(signal.SIGUSR1, True, 143, ["scontrol requeue 7"]), (signal.SIGTERM, True, 143, []),
     (signal.SIGUSR1, False, 143, []), (signal.SIGUSR1, True, 0, [])]
)  # fmt: skip
def test_near_its_limit_the_run_ends_and_the_job_is_requeued(
    tmp_path: Path, number: signal.Signals, requeue: bool, code: int, asked: list[str]
) -> None:
    """Whatever ends the batch script early ends the run by SIGTERM; only the limit asks for more time, and only for a
    run that was not at its end just then."""
    environment = stand_ins(tmp_path, f"trap 'exit {code}' TERM\ntouch started\nwhile true; do sleep 0.01; done")
    (job,) = rendered(config_of(str(tmp_path), a={}, b={}), requeue=requeue)
    batch = subprocess.Popen(["bash", "-c", job.script], cwd=tmp_path, env=environment)
    deadline_s = time.monotonic() + 120
    while not (tmp_path / "started").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    batch.send_signal(number)
    assert batch.wait(120) == code
    log = tmp_path / "log"
    assert (log.read_text().splitlines() if log.exists() else []) == asked
