"""Several hosts on one machine: a real SLURM of three nodes, and network namespaces with addresses of their own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from network_namespaces import Namespaces

NODES = ("n1", "n2", "n3")
SLURM_CONF = """
ClusterName=mrl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=Cores
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=15
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/controller.pid
SlurmctldLogFile={folder}/controller.log
SlurmdPidFile={folder}/node-%n.pid
SlurmdLogFile={folder}/node-%n.log
SlurmdSpoolDir={folder}/spool-%n
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=2000 State=UNKNOWN"
START_S = 120.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def needs(*programs: str) -> None:
    """Skip where this machine lacks one of the programs, or the right to use them."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; tools/setup.sh --dev installs them as root on Debian")
    if os.geteuid():
        pytest.skip("only root starts SLURM's daemons and makes network namespaces")


def wait_for(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Poll until the condition holds; fails with `what` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)


class Cluster:
    """A SLURM of three nodes, all on this machine; its daemons end with `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        host = socket.gethostname().partition(".")[0]
        controller_port, *ports = free_ports(1 + len(NODES))
        nodes = [NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports, strict=True)]
        for name in ("state", *(f"spool-{name}" for name in NODES)):
            (folder / name).mkdir()
        text = SLURM_CONF.format(
            host=host, controller_port=controller_port, folder=folder, nodes="\n".join(nodes), names=",".join(NODES)
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)

    def open(self) -> None:
        """Start munge, the controller and the nodes; returns once all are idle."""
        files = [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file")]
        more = [f"--log-file={self.folder}/munge.log", f"--seed-file={self.folder}/munge.seed"]
        self.run("munged", "--force", *files, *more)
        self.run("slurmctld")
        for name in NODES:
            self.run("slurmd", "-N", name)
        wait_for(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES), "nodes", START_S)

    def run(self, *argv: str) -> str:
        """Run a program of SLURM; returns what it says. Fails the test with its errors."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job, or of the first component of a heterogeneous one."""
        first = self.run("scontrol", "-o", "show", "job", number).splitlines()[0]
        return dict(word.partition("=")[::2] for word in first.split())

    def close(self) -> None:
        """End what the pid files name, the controller first."""
        if (self.folder / "controller.pid").exists():
            subprocess.run(["scancel", "--user=root"], env=self.environment, timeout=120, check=False)
        files = ["controller.pid", *(f"node-{name}.pid" for name in NODES), "munge.pid"]
        for path in (self.folder / name for name in files):
            if path.exists():
                end(int(path.read_text()))


def end(pid: int) -> None:
    """SIGTERM, and SIGKILL to what does not listen."""
    for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and Path(f"/proc/{pid}").exists():
            time.sleep(0.05)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with three idle nodes."""
    needs("slurmctld", "slurmd", "sbatch", "srun", "munged")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.open()
        yield cluster
    finally:
        cluster.close()


class Submitted:
    """A run whose jobs `mrl launch --slurm --submit` gave to a cluster."""

    def __init__(self, cluster: Cluster, run: Any, *words: str) -> None:
        self.cluster, self.run = cluster, run
        argv = [sys.executable, "-m", "mrl", "launch", str(run.config), "--slurm", "--submit", "--cpus", "6", *words]
        done = subprocess.run(
            [*argv, "--exchange.host", "0.0.0.0"],
            env=cluster.environment,
            cwd=run.config.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.jobs = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("submitted ")]

    def state(self, number: int = 0) -> str:
        """State of one of its jobs."""
        return self.cluster.job(self.jobs[number])["JobState"]

    def output(self) -> str:
        """What all its jobs have printed."""
        return "\n".join(path.read_text() for path in sorted(self.run.config.parent.glob("slurm-*.out")))

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 480.0) -> None:
        """Poll; fails with the output of the jobs and the logs of the roles."""
        try:
            wait_for(condition, what, timeout_s)
        except AssertionError as error:
            pytest.fail(f"{error}\n{self.output()[-4000:]}\n{self.run.tail()}")

    def finish(self) -> None:
        """Wait until all jobs have completed."""
        self.until(lambda: all(self.state(number) in ENDED for number in range(len(self.jobs))), "the end of all jobs")
        states = [self.state(number) for number in range(len(self.jobs))]
        assert states == ["COMPLETED"] * len(self.jobs), f"{self.output()[-4000:]}\n{self.run.tail()}"


@pytest.fixture
def submit(slurm: Cluster, make_run: Callable[..., Any]) -> Iterator[Callable[..., Submitted]]:
    """A factory of submitted runs; what is left of their jobs is cancelled at the end."""
    jobs: list[str] = []

    def make(*words: str, **how: Any) -> Submitted:
        submitted = Submitted(slurm, make_run(**how), *words)
        jobs.extend(submitted.jobs)
        return submitted

    yield make
    slurm.run("scancel", "--quiet", *jobs)
    wait_for(lambda: not slurm.run("squeue", "-h").strip(), "an empty queue", 120.0)


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    """Two hosts."""
    needs("ip")
    made = Namespaces(2)
    try:
        try:
            made.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield made
    finally:
        made.close()
