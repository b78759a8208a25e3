"""Batch scripts of a run on several SLURM hosts. They ask for the hosts and run `mrl launch` on the first.

There are three shapes: one job of equal hosts; a heterogeneous job, whose first component has the daemons alone; and
separate jobs, one per policy, which join through the run folder, where SLURM cannot give all hosts at once. The run
folder lies on a file system that all hosts share.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from mrl.config.run_folder import run_folder_of
from mrl.config.schema import RunConfig
from mrl.config.unit_names import parse_units
from mrl.errors import ConfigError
from mrl.processes.planning.hosts import MRL, SRUN, Host, check_hosts
from mrl.processes.planning.plan import build_plan

Shape = Literal["equal", "heterogeneous", "separate"]
REPORT_S = 60
"""Seconds that a run has before the job's limit, beyond `supervision.stop_s`, to save, end and write its report."""
JOIN_WAIT_S = 7 * 24 * 3600
"""Seconds that a joining job waits for the run's job, which may start or be requeued much later; the job's limit bounds
the wait."""
TRY_AGAIN = 75


@dataclass(frozen=True, slots=True)
class SlurmRequest:
    """Resources that the batch scripts ask SLURM for, and how they begin the run."""

    num_hosts: int
    cpus_per_host: int
    gpus_per_host: int = 0
    minutes: int = 60
    partition: str = ""
    shape: Shape = "equal"
    requeue: bool = False
    begin: Literal["", "--clean", "--resume"] = ""


class Job(NamedTuple):
    """One batch script. Further scripts are submitted to start after the first."""

    title: str
    script: str


def render(
    config: RunConfig,
    config_path: Path,
    request: SlurmRequest,
    overrides: Sequence[str] = (),
) -> list[Job]:
    """Return the batch scripts, the run's own first. Raises ConfigError when the run does not fit the request."""
    where = str(config_path)
    _check_units(config, request, where)
    hosts = _hosts(config, request, where)
    config = _as_launched(config, request.shape)
    check_hosts(config, [host.name for host in hosts], where=where)
    threads = _threads(config, request, hosts)
    _check_fit(config, request, threads, where)
    launch = (*MRL, "launch", str(config_path.absolute()))
    shape = _Shape(config, request, hosts, (*launch, *overrides), run_folder_of(config).path)
    match request.shape:
        case "equal":
            return _equal(shape)
        case "heterogeneous":
            return _heterogeneous(shape, daemon_cpus=threads[hosts[0].name])
        case "separate":
            return _separate(shape)


class _Shape(NamedTuple):
    """Arguments that the renderers of all shapes share."""

    config: RunConfig
    request: SlurmRequest
    hosts: Sequence[Host]
    launch: tuple[str, ...]
    run_folder: Path


def _equal(shape: _Shape) -> list[Job]:
    options = _job_options(shape.config, shape.request) | _host_options(shape.request, shape.request.num_hosts)
    return [Job("run", _run_script(_directives(options), _named(""), shape))]


def _heterogeneous(shape: _Shape, *, daemon_cpus: int) -> list[Job]:
    daemons: dict[str, object] = {"nodes": 1, "ntasks": 1, "cpus-per-task": daemon_cpus}
    others = _host_options(shape.request, shape.request.num_hosts - 1) | _partition(shape.request)
    head = [
        *_directives(_job_options(shape.config, shape.request) | daemons), "#SBATCH hetjob", *_directives(others)
    ]  # fmt: skip
    srun = ", ".join(f'"{word}"' for word in (SRUN[0], "--het-group=1", *SRUN[1:]))
    own: tuple[str, ...] = ("--launch.policies_on_first_host", "false", "--launch.remote", f"[{srun}]")
    if shape.request.gpus_per_host:
        own = (*own, "--launch.gpus_per_host", str(shape.request.gpus_per_host))
    hosts = f"{_named('_HET_GROUP_0')},{_named('_HET_GROUP_1')}"
    return [Job("run", _run_script(head, hosts, shape._replace(launch=(*shape.launch, *own))))]


def _separate(shape: _Shape) -> list[Job]:
    head = _directives(_job_options(shape.config, shape.request) | _host_options(shape.request, 1))
    launch = (*shape.launch, "--launch.hosts_join", "true")
    names = ",".join(host.name for host in shape.hosts)
    joins = [Job(host.name, _join_script(head, host.name, shape)) for host in shape.hosts[1:]]
    return [Job("run", _run_script(head, names, shape._replace(launch=launch))), *joins]


def _named(group: str) -> str:
    return f'$(scontrol show hostnames "$SLURM_JOB_NODELIST{group}" | paste -sd, -)'


_AGAIN = """
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -e {config_json} ]; then begin=(--resume); fi"""
_RUN = """
hosts={hosts}
begin=({begin}){again}
{launch} --hosts "$hosts" "${{begin[@]}}" &
"""
_SUPERVISED = """run=$!
{limit}trap 'kill -TERM "$run" 2>/dev/null || true' {ending}
while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done
code=0; wait "$run" || code=$?
"""
_NEAR_LIMIT = """near_limit=
trap 'near_limit=1; kill -TERM "$run" 2>/dev/null || true' USR1
"""


def _run_script(head: Sequence[str], hosts: str, shape: _Shape) -> str:
    """Return the run's script: near the job's limit the run saves and ends; a requeued job goes on with it.

    A job whose run has reached its end by then is not requeued.
    """
    again = _AGAIN.format(config_json=shlex.quote(f"{shape.run_folder}/config.json")) if shape.request.requeue else ""
    body = _RUN.format(hosts=hosts, begin=shape.request.begin, again=again, launch=shlex.join(shape.launch))
    return _script(head, body, shape.request, '[ -n "$near_limit" ] && [ "$code" -ne 0 ]')


def _join_script(head: Sequence[str], host: str, shape: _Shape) -> str:
    """Return the script of a joining job, which is requeued, too, when the run's job was requeued and so lost."""
    join = (*MRL, "join", str(shape.run_folder), "--host", host, "--wait-s", str(JOIN_WAIT_S))
    condition = f'[ -n "$near_limit" ] || [ "$code" -eq {TRY_AGAIN} ]'
    return _script(head, f"\n{shlex.join(join)} &\n", shape.request, condition)


def _script(head: Sequence[str], body: str, request: SlurmRequest, again: str) -> str:
    limit, ending = (_NEAR_LIMIT, "TERM INT") if request.requeue else ("", "TERM INT USR1")
    tail = f'if {again}; then scontrol requeue "$SLURM_JOB_ID"; fi\n' if request.requeue else ""
    settings = "set -euo pipefail\nexport PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1"
    supervised = _SUPERVISED.format(limit=limit, ending=ending)
    return "\n".join(["#!/bin/bash", *head, settings]) + body + supervised + tail + 'exit "$code"\n'


def _directives(options: dict[str, object]) -> list[str]:
    return [f"#SBATCH --{name}={value}" if value != "" else f"#SBATCH --{name}" for name, value in options.items()]


def _job_options(config: RunConfig, request: SlurmRequest) -> dict[str, object]:
    options: dict[str, object] = {
        "job-name": f"mrl-{config.run.name}",
        "time": request.minutes,
        "signal": f"B:USR1@{lead_s(config)}",
        "open-mode": "append",
        ("requeue" if request.requeue else "no-requeue"): "",
    }
    return options | _partition(request)


def _partition(request: SlurmRequest) -> dict[str, object]:
    return {"partition": request.partition} if request.partition else {}


def _host_options(request: SlurmRequest, num_hosts: int) -> dict[str, object]:
    options: dict[str, object] = {
        "nodes": num_hosts,
        "ntasks-per-node": 1,
        "cpus-per-task": request.cpus_per_host,
    }
    return options | ({"gpus-per-node": request.gpus_per_host} if request.gpus_per_host else {})


def lead_s(config: RunConfig) -> int:
    """Return the seconds before the job's limit at which the run is told to end."""
    return REPORT_S + math.ceil(config.supervision.stop_s)


def _check_units(config: RunConfig, request: SlurmRequest, where: str) -> None:
    """Raises ConfigError for a unit that names its host where SLURM has yet to choose the hosts."""
    named = [unit.name for unit in parse_units(config.allocation.units) if unit.host]
    if named and request.shape != "separate":
        raise ConfigError(
            "allocation.units: the hosts of a SLURM job are unknown before it starts",
            where=where,
            got=named[0],
            wanted="units of the first host, without a host name",
            cure="use --separate, where each host is named after its policy: "
            + ", ".join(f"{policy}/{named[0].partition('/')[2]}" for policy in config.policies),
        )


def _hosts(config: RunConfig, request: SlurmRequest, where: str) -> list[Host]:
    """Return stand-ins for the hosts that SLURM has yet to choose; separate jobs' hosts have the policies' names."""
    if request.shape == "separate":
        if request.num_hosts not in (1, len(config.policies)):
            raise ConfigError(
                "--separate makes one job per policy",
                where=where,
                got=request.num_hosts,
                wanted=f"{len(config.policies)} hosts",
                cure="leave --hosts out",
            )
        return [Host(name) for name in config.policies]
    if request.shape == "heterogeneous" and request.num_hosts < 2:
        raise ConfigError(
            "--heterogeneous needs one host for the daemons and others for policies",
            where=where,
            got=request.num_hosts,
            wanted="--hosts 2 or more",
        )
    return [Host(f"host-{index}") for index in range(request.num_hosts)]


def _as_launched(config: RunConfig, shape: Shape) -> RunConfig:
    """Return the configuration with the overrides that the script itself adds."""
    changes = {"hosts_join": shape == "separate"} | (
        {"policies_on_first_host": False} if shape == "heterogeneous" else {}
    )
    return config.model_copy(update={"launch": config.launch.model_copy(update=changes)})


def _threads(config: RunConfig, request: SlurmRequest, hosts: Sequence[Host]) -> dict[str, int]:
    """Return host -> threads of its roles. Raises ConfigError when a role needs more GPUs than a host has."""
    gpus = [str(index) for index in range(request.gpus_per_host)]
    threads = {host.name: 0 for host in hosts}
    for host in hosts:
        plan = build_plan(config, Path("runs"), gpus=gpus, hosts=hosts, here=host.name)
        for spec in plan.processes:
            ranks = config.policies[spec.policy].learner.ranks_per_host if spec.role == "learner" else 1
            threads[host.name] += ranks * int(spec.env["OMP_NUM_THREADS"]) if spec.host == host.name else 0
    return threads


def _check_fit(config: RunConfig, request: SlurmRequest, threads: dict[str, int], where: str) -> None:
    if request.minutes * 60 <= lead_s(config):
        raise ConfigError(
            "--minutes: too short, the run would be told to end at its start",
            where=where,
            got=request.minutes,
            wanted=f"> {lead_s(config) / 60:g}",
        )
    apart = [] if config.launch.policies_on_first_host else list(threads)[:1]
    most = max(count for name, count in threads.items() if name not in apart)
    if most > request.cpus_per_host:
        raise ConfigError("too few CPUs per host", where=where, got=request.cpus_per_host, wanted=f">= {most}")
