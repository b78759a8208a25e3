"""Names, addresses and commands of several hosts, and what may not be asked of them."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.schema import GatewayTable, RunConfig
from mrl.config.task_tables import TaskTable
from mrl.errors import ConfigError
from mrl.processes.planning.dry_run import describe
from mrl.processes.planning.hosts import (
    SRUN,
    Host,
    check_hosts,
    host_environment,
    idle_hosts,
    join_argv,
    parse_hosts,
    remote_words,
)
from mrl.processes.planning.plan import build_plan
from tests.support.word_runs import word_run


def config_of(*policies: str, exchange: str = "0.0.0.0", device: str = "cpu", **launch: Any) -> RunConfig:
    return word_run({name: {"device": device} for name in policies}, exchange={"host": exchange}, launch=launch)


def agents_at(address: str) -> RunConfig:
    """A run whose gateway listens there."""
    config = config_of("a", "b")
    task = TaskTable(source="agent", dataset="outside")
    return config.model_copy(update={"tasks": {"t": task}, "gateway": GatewayTable(host=address)})


def test_hosts_are_names_with_or_without_an_address() -> None:
    """What is printed reads back; an empty list is a run on this host."""
    hosts = parse_hosts("a,b-1.c=10.0.0.2")
    assert hosts == (Host("a"), Host("b-1.c", "10.0.0.2"))
    assert parse_hosts(",".join(map(str, hosts))) == hosts
    assert parse_hosts("") == ()
    assert host_environment(hosts[1]) == {"MRL_HOST": "b-1.c", "MRL_ADDRESS": "10.0.0.2"}
    assert host_environment(hosts[0]) == {"MRL_HOST": "a"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a,a", "duplicate host"),
        ("a,../b", "invalid host"),
        ("=1.2.3.4", "invalid host"),
        ("a,b=fd00::1", "IPv4 addresses; got 'b=fd00::1'"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text: str, part: str) -> None:
    """A name also names files, so it is a plain word."""
    with pytest.raises(ConfigError, match=part):
        parse_hosts(text)


def test_a_command_gets_to_a_host_as_the_template_says() -> None:
    """ssh hands words to a shell, so there they come as one that a shell takes apart again."""
    there = join_argv("n1", Path("/my runs/r"), ["ip", "netns", "exec", "{host}"])
    assert there[:4] == ("ip", "netns", "exec", "n1")
    assert there[-7:] == (sys.executable, "-m", "mrl", "join", "/my runs/r", "--host", "n1")
    quoted = join_argv("n1", Path("/my runs/r"), ["/usr/bin/ssh", "-q", "{host}"])
    assert quoted[:3] == ("/usr/bin/ssh", "-q", "n1")
    assert quoted[3].endswith(f"{sys.executable} -m mrl join '/my runs/r' --host n1")
    assert len(quoted) == 4


def test_srun_is_the_way_within_a_slurm_job_and_only_there() -> None:
    """Without another host, or where hosts join by themselves, nothing is started anywhere."""
    hosts = parse_hosts("a,b")
    job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "a"}
    assert remote_words(config_of("x", "y"), hosts, job, where="t") == list(SRUN)
    with_cores = remote_words(config_of("x", "y"), hosts, job | {"SLURM_CPUS_PER_TASK": "6"}, where="t")
    assert with_cores == list(SRUN), "a step that names no number of cores has all of its job on the host"
    assert "--cpu-bind=none" in SRUN
    own = config_of("x", "y", remote=["ssh", "{host}"])
    assert remote_words(own, hosts, {"SLURM_JOB_ID": "7"}, where="t") == ["ssh", "{host}"]
    assert remote_words(own, hosts[:1], {}, where="t") == []
    assert remote_words(config_of("x", "y", hosts_join=True), hosts, {"SLURM_JOB_ID": "7"}, where="t") == []
    with pytest.raises(ConfigError, match="needed to start commands on other hosts"):
        remote_words(config_of("x", "y"), hosts, {}, where="t")
    with pytest.raises(ConfigError, match="no placeholder for the host name"):
        remote_words(config_of("x", "y", remote=["ssh", "b"]), hosts, {}, where="t")


@pytest.mark.parametrize("job", [{}, {"SLURMD_NODENAME": "n2"}])
def test_the_first_host_of_a_slurm_job_is_the_one_that_this_runs_on(job: dict[str, str]) -> None:
    """The shell of `salloc` may be one of the login node, whose roles others would look for on the first host."""
    with pytest.raises(
        ConfigError,
        match=r"must run on the first host of the list; got '.*'; wanted n1; cure: put `srun .*--cpu-bind=none",
    ):
        remote_words(config_of("x", "y"), parse_hosts("n1,n2"), job | {"SLURM_JOB_ID": "7"}, where="t")


@pytest.mark.parametrize(("first", "told"), [("n1.cluster.org", "n1"), ("n1", "n1.cluster.org")])
def test_a_first_host_is_called_as_slurm_calls_it(first: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its domain or without, and the line says which. Where SLURM does not say, either is this host."""
    hosts, job = parse_hosts(f"{first},n2"), {"SLURM_JOB_ID": "7"}
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(nodename=told))
    assert remote_words(config_of("x", "y"), hosts, job, where="t") == list(SRUN)
    line = f"SLURM has another name for this host; got '{first}'; wanted {told}; cure: use the names from `scontrol"
    with pytest.raises(ConfigError, match=line):
        remote_words(config_of("x", "y"), hosts, job | {"SLURMD_NODENAME": told}, where="t")


def test_hosts_of_a_slurm_job_that_a_run_leaves_idle_are_told_of() -> None:
    """A step may have fewer than its job; where words of one's own start others, nobody knows what is left."""
    job, plain = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}, config_of("x", "y")
    assert "3 hosts, and the run uses only 1: `mrl launch CONFIG --hosts" in idle_hosts(plain, (), job)
    assert "uses only 2" in idle_hosts(plain, parse_hosts("a,b"), job)
    assert idle_hosts(plain, parse_hosts("a,b,c"), job) == ""
    assert idle_hosts(plain, (), job | {"SLURM_STEP_NUM_NODES": "1"}) == ""
    assert idle_hosts(plain, (), {}) == ""
    mixed = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_HET_SIZE": "2"}
    assert "2 components, and the run uses only the first: `mrl launch CONFIG --slurm --het" in idle_hosts(
        plain, (), mixed
    )
    assert idle_hosts(config_of("x", "y", remote=["srun", "--het-group=1", "{host}"]), parse_hosts("a,b"), mixed) == ""


@pytest.mark.parametrize(
    ("hosts", "config", "part"),
    [
        (["h0", "h1"], config_of("a", "b", exchange="127.0.0.1"), "exchange.host: with several hosts"),
        (["h0", "h1"], config_of("a", "b", exchange="10.0.0.1"), "exchange.host: with several hosts"),
        (["h0", "h1"], agents_at("127.0.0.1"), "gateway.host: workers on other hosts cannot reach this"),
        (["h0"], config_of("a", hosts_join=True), "needs more than one host"),
        ([], config_of("a", policies_on_first_host=False), "needs more than one host"),
    ],
)
def test_hosts_that_contradict_the_configuration_are_refused(hosts: list[str], config: RunConfig, part: str) -> None:
    """A policy lives whole on one host, and every host listens on its own address."""
    with pytest.raises(ConfigError, match=part):
        check_hosts(config, hosts, where="test")


def test_hosts_that_fit_pass() -> None:
    """A host of daemons alone adds one."""
    check_hosts(config_of("a", "b", exchange="127.0.0.1"), ["h0"], where="test")
    check_hosts(config_of("a", "b"), ["h0", "h1"], where="test")
    check_hosts(agents_at("127.0.0.1"), ["h0"], where="test")
    check_hosts(agents_at("10.0.0.1"), ["h0", "h1"], where="test")
    check_hosts(config_of("a", "b", policies_on_first_host=False), ["h0", "h1", "h2"], where="test")


def test_a_dry_run_shows_hosts_commands_devices_and_environments() -> None:
    """Every process of every host, where it will be started from."""
    config = config_of("a", "b", device="cuda")
    plan = build_plan(config, Path("/r"), gpus=["5"], hosts=parse_hosts("h0,h1"), remote=["ssh", "{host}"])
    lines = list(describe(plan, config))
    assert lines[0] == "host h0, owns the run folder"
    assert lines[lines.index("  learner/a, GPUs 5") + 1].startswith(f"    {sys.executable} -m mrl learner")
    there = lines.index("host h1")
    assert "  learner/b, GPUs visible on the host" in lines[there:]
    assert "  supervisor/h1" in lines[:there]
    assert any("MRL_HOST=h1" in line for line in lines[there:])
