"""One SLURM batch script for a run on several hosts: it asks for the hosts and runs `mrl train` on the first.

The supervisor on the first host starts what lives elsewhere through `srun`, with the same role commands as on one host.
The run folder has to lie on a file system that all hosts share.
"""

import ipaddress
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.launch.plan import build_plan


@dataclass(frozen=True, slots=True)
class SlurmRequest:
    """What the batch script asks SLURM for."""

    num_hosts: int
    cpus_per_host: int
    gpus_per_host: int = 0
    minutes: int = 60
    partition: str = ""


def render(config: RunConfig, config_path: Path, request: SlurmRequest, overrides: Sequence[str] = ()) -> str:
    """The text of the batch script. Raises ConfigError when the run does not fit what is asked for."""
    hosts = [f"host-{index}" for index in range(request.num_hosts)]
    where = str(config_path)
    check_hosts(config, hosts, where=where)
    _check_fit(config, request, hosts, where)
    options = {
        "job-name": f"mrl-{config.run.name}",
        "nodes": request.num_hosts,
        "ntasks-per-node": 1,
        "cpus-per-task": request.cpus_per_host,
        "time": request.minutes,
        "signal": "B:TERM@60",
    }
    options |= {"gpus-per-node": request.gpus_per_host} if request.gpus_per_host else {}
    options |= {"partition": request.partition} if request.partition else {}
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    words = " ".join(shlex.quote(word) for word in (str(config_path.absolute()), *overrides))
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "set -euo pipefail",
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)',
            f'exec python -m mrl train --hosts "$hosts" {words}',
            "",
        ]
    )


def check_hosts(config: RunConfig, hosts: Sequence[str], *, where: str) -> None:
    """Raises ConfigError when the configuration cannot run on these hosts."""
    if len(hosts) <= 1:
        return
    if len(set(hosts)) < len(hosts):
        raise ConfigError("hosts: one stands twice", where=where, got=", ".join(hosts))
    if len(hosts) > len(config.policies):
        raise ConfigError(
            "more hosts than policies; a policy lives whole on one host",
            where=where,
            got=len(hosts),
            wanted=f"<= {len(config.policies)}",
        )
    if _is_loopback(config.exchange.host):
        raise ConfigError(
            "exchange.host: other hosts cannot reach a loopback address",
            where=where,
            got=config.exchange.host,
            wanted="an address of the first host, or 0.0.0.0",
            cure="--exchange.host 0.0.0.0",
        )


def _check_fit(config: RunConfig, request: SlurmRequest, hosts: Sequence[str], where: str) -> None:
    gpus = [str(index) for index in range(request.gpus_per_host)]
    plan = build_plan(config, Path("runs"), gpus=gpus, hosts=hosts)
    lives_on = {name: hosts[index % len(hosts)] for index, name in enumerate(config.policies)}
    threads = dict.fromkeys(hosts, 0)
    for spec in plan.processes:
        ranks = config.policies[spec.policy].learner.processes if spec.role == "learner" else 1
        threads[lives_on.get(spec.policy, hosts[0])] += ranks * int(spec.env["OMP_NUM_THREADS"])
    most = max(threads.values())
    if most > request.cpus_per_host:
        raise ConfigError("too few CPUs per host", where=where, got=request.cpus_per_host, wanted=f">= {most}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
