"""The hosts of a run: names and addresses, checks of a run over several hosts, and commands that reach a host."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.transport.endpoints import ADDRESS, HOST, is_loopback

SRUN = (
    "srun", "--nodes=1", "--ntasks=1", "--overlap", "--nodelist={host}", "--export=ALL", "--kill-on-bad-exit=1",
    "--cpu-bind=none",
)  # fmt: skip
"""Command that starts one step on one host of the SLURM job in which the first supervisor runs.

The step may use all cores that its job has on the host. A step that asks for a number of cores would get no more, and a
bound step only one.
"""
HOST_WORD = "{host}"
MRL = (sys.executable, "-m", "mrl")
"""Beginning of the command line of every process of a run, apart from those that torchrun starts."""
WILDCARDS = ("0.0.0.0", "*")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Host:
    """One host: the name by which it is started, and its address where other hosts do not reach it by its hostname."""

    name: str
    address: str = ""

    def __str__(self) -> str:
        """Text of the host, which `parse_hosts` reads."""
        return f"{self.name}={self.address}" if self.address else self.name


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of "a,b=10.0.0.2". Raises ConfigError for a bad or repeated name, and for an IPv6 address."""
    hosts = []
    for word in filter(None, text.split(",")):
        name, _, address = word.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError("--hosts: invalid host", got=word, wanted="NAME or NAME=ADDRESS, separated by commas")
        if ":" in address:  # links between hosts do not listen on IPv6
            wanted = "NAME=10.0.0.2, or a name that resolves to such an address"
            raise ConfigError("--hosts: hosts need IPv4 addresses", got=word, wanted=wanted)
        hosts.append(Host(name, address))
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("--hosts: duplicate host", got=name)
    return tuple(hosts)


def host_environment(host: Host) -> dict[str, str]:
    """Return the variables that tell a host's processes its name and address."""
    return {HOST: host.name} | ({ADDRESS: host.address} if host.address else {})


def join_argv(host: str, run_folder: Path, remote: Sequence[str]) -> tuple[str, ...]:
    """Return the command by which the first host starts the supervisor of another host."""
    command = ("env", "-C", os.getcwd(), *MRL, "join", str(run_folder), "--host", host)
    words = tuple(word.replace(HOST_WORD, host) for word in remote)
    # ssh joins its words with spaces and hands them to a shell.
    return (*words, shlex.join(command)) if Path(words[0]).name == "ssh" else (*words, *command)


def remote_words(config: RunConfig, hosts: Sequence[Host], environ: Mapping[str, str], *, where: str) -> list[str]:
    """Return the words that start a command on another host; [] where there is none, or others join by themselves.

    Raises ConfigError when there is no way to start a command there.
    """
    if len(hosts) < 2 or config.launch.hosts_join:
        return []
    words = config.launch.remote
    if not words and "SLURM_JOB_ID" in environ:
        _check_first(hosts[0].name, environ)
        words = list(SRUN)
    if not words:
        raise ConfigError(
            "launch.remote: needed to start commands on other hosts outside a SLURM job",
            where=where,
            got="[]",
            cure="""add --launch.remote '["ssh", "{host}"]', or use `mrl launch --slurm`""",
        )
    if not any(HOST_WORD in word for word in words):
        raise ConfigError("launch.remote: no placeholder for the host name", where=where, got=words, wanted=HOST_WORD)
    return words


def _check_first(first_host: str, environ: Mapping[str, str]) -> None:
    """Raises ConfigError where this host of a SLURM job is not the first of the run, or SLURM calls it otherwise."""
    told, hostname = environ.get("SLURMD_NODENAME"), os.uname().nodename
    here = told or hostname
    is_alike = here.partition(".")[0] == first_host.partition(".")[0]
    if told and is_alike and here != first_host:  # nor would srun find the others by such names
        what, cure = "--hosts: SLURM has another name for this host", "use the names from `scontrol show hostnames`"
        raise ConfigError(what, got=first_host, wanted=here, cure=cure)
    if not is_alike:
        words = f"srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --nodelist={first_host}"
        cure = f"put `{words}` before this command, or use sbatch"
        raise ConfigError(
            "--hosts: this command must run on the first host of the list", got=here, wanted=first_host, cure=cure
        )


def idle_hosts(config: RunConfig, hosts: Sequence[Host], environ: Mapping[str, str]) -> str:
    """Return a note about hosts of a SLURM job that the run leaves idle; "" where no such host is known."""
    if config.launch.remote or config.launch.hosts_join:
        return ""
    if (components := environ.get("SLURM_HET_SIZE", "1")) != "1":
        cure = "`mrl launch CONFIG --slurm --heterogeneous` prints a script that uses more"
        return f"this SLURM job has {components} components, and the run uses only the first: {cure}"
    num_hosts = int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_JOB_NUM_NODES", "1")))
    if num_hosts <= (num_used := max(1, len(hosts))):
        return ""
    cure = '`mrl launch CONFIG --hosts "$(scontrol show hostnames | paste -sd, -)"` uses all'
    return f"this SLURM job has {num_hosts} hosts, and the run uses only {num_used}: {cure}"


def check_hosts(config: RunConfig, hosts: Sequence[str], *, where: str) -> None:
    """Raises ConfigError when the configuration cannot run on these hosts."""
    if len(hosts) < 2:
        if config.launch.hosts_join or not config.launch.policies_on_first_host:
            key = "hosts_join" if config.launch.hosts_join else "policies_on_first_host"
            raise ConfigError(
                f"launch.{key}: needs more than one host", where=where, cure="name more hosts with --hosts"
            )
        return
    if config.exchange.host not in WILDCARDS:
        raise ConfigError(
            "exchange.host: with several hosts, every host has to listen on its own address",
            where=where,
            got=config.exchange.host,
            wanted="0.0.0.0 for all addresses (every link is encrypted and needs a key of the run)",
            cure="set --exchange.host 0.0.0.0",
        )
    if config.has_gateway and is_loopback(config.gateway.host):
        raise ConfigError(
            "gateway.host: workers on other hosts cannot reach this address",
            where=where,
            got=config.gateway.host,
            wanted="an address of the first host in a private network (the gateway uses HTTP without TLS)",
            cure="set --gateway.host to such an address, for example 10.0.0.1",
        )


def counting_gpus(config: RunConfig, hosts: Sequence[Host], num_gpus: int) -> RunConfig:
    """Return the configuration for all hosts, with the first host's `num_gpus` where `launch.gpus_per_host` is 0."""
    if len(hosts) < 2 or config.launch.gpus_per_host or not num_gpus:
        return config
    return config.model_copy(update={"launch": config.launch.model_copy(update={"gpus_per_host": num_gpus})})


def is_in_memory(config: RunConfig, policy: str) -> bool:
    """Whether engines read new weights in the memory of their learner, not on a disk.

    With `weights_in` = "auto" they do in a run on one host, unless the server was started by others (`url`), perhaps
    elsewhere.
    """
    rollout = config.policies[policy].rollout
    if rollout.weights_in != "auto":
        return rollout.weights_in != "disk"
    return config.exchange.host not in WILDCARDS and not rollout.server.url
