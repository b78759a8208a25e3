"""The processes of a run: their names, hosts, commands and environments. Starts nothing.

The learner of a policy is one process on one host, or, where `learner.hosts` asks for several, a process on each; its
workers may live on others. The first host has the daemons. Its supervisor starts one process for every other host,
`mrl join`, which is the supervisor of that host.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mrl.config.policy_tables import PolicyTable
from mrl.config.rules.unit_rules import are_in_turns, fitting_units, may_sleep
from mrl.config.run_folder import RunFolder, run_folder_of
from mrl.config.schema import RunConfig
from mrl.config.unit_names import Unit, parse_units
from mrl.errors import ConfigError
from mrl.learner.ranks.rank_place import LEARNER_HOSTS, LEARNER_PLACE
from mrl.parent_death import CORES
from mrl.processes.planning.devices import visible_gpus
from mrl.processes.planning.hosts import MRL, Host, host_environment, join_argv
from mrl.processes.planning.placement import Key, ProcessPlacement, least_gpus, most_gpus, seats
from mrl.processes.planning.time_sharing import check_turns, turn_environment
from mrl.processes.planning.torchrun import (
    LOCAL,
    allocator_environment,
    engine_environment,
    nccl_environment,
    torchrun_argv,
    torchrun_environment,
)
from mrl.processes.planning.unit_workers import (
    KEEPS_ENVIRONMENT,
    UNIT,
    UNIT_EPOCH,
    UNIT_LINE,
    UNIT_POLICY,
    UNIT_RUN,
    not_leased,
    unit_hosts,
    units_of,
)

HOST_ROLE = "supervisor"
"""Role of a process that supervises another host."""
Role = Literal["exchange", "allocator", "gateway", "learner", "worker", "kept-version"]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process. `name` is unique in the run, and its telemetry bears that name ("worker/qwen/0")."""

    name: str
    role: str
    policy: str
    index: int
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    """Variables added to the supervisor's own environment."""
    restart: Literal["always", "until_done", "leased", "spared"] = "always"
    """"until_done": exit code 0 means finished; "always": a process that ends while the run goes on has failed.

    "spared": as "always", but repeated failures do not end the run. "leased": as "spared", but only a new lease of its
    unit starts the process again.
    """
    host: str = ""
    """Host that the process runs on; "" in a run on one host."""
    has_line: bool = False
    """Whether its stdin is a socket to its supervisor (`mrl.processes.sleep_channel`), else empty."""

    @property
    def log_name(self) -> str:
        """File name of the process's log."""
        return self.name.replace("/", "-") + ".log"


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a run, in the order in which they start, and the processes that start other supervisors."""

    processes: tuple[ProcessSpec, ...]
    hosts: tuple[Host, ...] = ()
    """All hosts, of which the first has the daemons; empty for a run on this host alone."""
    unit_hosts: frozenset[str] = frozenset()
    """Hosts with units, on which leases start workers."""
    joins: tuple[ProcessSpec, ...] = ()
    """Processes of the first host that start the supervisors of the others; empty where hosts join by themselves."""
    leased: tuple[ProcessSpec, ...] = ()
    """Workers that leases start, one at a time on a unit: for each unit one of every policy whose engine fits it."""

    @property
    def first_host(self) -> str:
        """Name of the host that owns the run folder."""
        return self.hosts[0].name if self.hosts else ""

    @property
    def other_hosts(self) -> tuple[str, ...]:
        """Names of the other hosts that have roles."""
        used = {spec.host for spec in self.processes} | self.unit_hosts
        return tuple(host.name for host in self.hosts[1:] if host.name in used)

    @property
    def learners(self) -> frozenset[str]:
        """Names of the processes with the first rank of each learner: a learner ends when this process does."""
        return frozenset(spec.name for spec in self.processes if spec.role == "learner" and not spec.index)

    def spares(self, host: str) -> bool:
        """Whether the run can go on without a host: it has only workers, and learning policies have more elsewhere."""
        learning = {spec.policy for spec in self.processes if spec.role == "learner"}
        served = {spec.policy for spec in self.processes if spec.role == "worker" and spec.host != host}
        here = [spec for spec in self.processes if spec.host == host]
        return all(spec.role == "worker" and spec.policy not in learning - served for spec in here)

    def started_by(self, host: str) -> tuple[ProcessSpec, ...]:
        """Return the processes that a host's supervisor starts; for the first host also those of `joins`."""
        here = tuple(spec for spec in self.processes if spec.host == host)
        return (*self.joins, *here) if host == self.first_host else here


def build_plan(
    config: RunConfig,
    run_folder: Path,
    *,
    gpus: Sequence[str] = (),
    hosts: Sequence[Host] = (),
    here: str = "",
    remote: Sequence[str] = (),
) -> Plan:
    """Return the plan of a run in `run_folder`.

    With several `hosts` policies live on them in turn. `gpus` are those of the host `here`, by default the first;
    processes of another host get their devices by the plan that is made there. `remote` are the words that start a
    command on another host; without them other hosts join by themselves. Raises ConfigError when a policy asks for
    GPUs that do not exist.
    """
    first = hosts[0].name if hosts else ""
    here = here or first
    check_turns(config, [host.name for host in hosts])
    shown, gpus = gpus, not_leased(config, gpus, here, is_first=here == first)
    seated = _seats(config, [host.name for host in hosts], here=here, shown=shown)
    specs = [_daemon("exchange", run_folder), _daemon("allocator", run_folder)]
    if config.has_gateway:
        specs.append(_daemon("gateway", run_folder))
    for (role, name, index), seat in sorted(seated.items(), key=lambda item: (item[0][0], *_order(config, item[0]))):
        own = _gpus_of(seat, gpus, here, name)
        if role == "learner":
            reach, policy = _reach(config, name, index, seated), config.policies[name]
            specs.append(_learner(name, policy, index, run_folder=run_folder, gpus=own, reach=reach))
        else:
            specs.append(_worker(name, config.policies[name], index, run_folder=run_folder, gpus=own))
    by_name = {host.name: host for host in hosts}
    placed = []
    for spec in specs:
        at = seated[spec.role, spec.policy, spec.index].host if spec.policy else first  # type: ignore[index]
        own_host = host_environment(by_name[at]) if at in by_name else {}
        placed.append(replace(spec, host=at, env=spec.env | own_host | turn_environment(config, spec)))
    plan = Plan(tuple(placed), tuple(hosts), unit_hosts(config, [host.name for host in hosts]))
    joins = [
        _join(by_name[name], run_folder, remote, is_spared=plan.spares(name))
        for name in (plan.other_hosts if remote else ())
    ]
    leased = _leased(config, run_folder, shown, first=first, here=here)
    return replace(plan, joins=tuple(joins), leased=tuple(leased))


def _leased(
    config: RunConfig, run_folder: Path, gpus: Sequence[str], *, first: str, here: str
) -> Iterator[ProcessSpec]:
    """Yield the workers that leases may start; GPUs of another host are named by the plan made there."""
    for unit in parse_units(config.allocation.units):
        host = unit.host or first
        shown = gpus if host == here else ()
        for name in config.learning:
            if unit.name in fitting_units(config, name):
                spec = unit_worker(config, run_folder, unit, policy=name, epoch=0, gpus=shown)
                yield replace(spec, host=host)


def _seats(config: RunConfig, hosts: Sequence[str], *, here: str, shown: Sequence[str]) -> dict[Key, ProcessPlacement]:
    """Return the seats of all processes; each host counts as showing `launch.gpus_per_host` GPUs, or this one's."""
    first = hosts[0] if hosts else ""
    offered = hosts if config.launch.policies_on_first_host or len(hosts) < 2 else hosts[1:]
    num_gpus = config.launch.gpus_per_host if len(hosts) > 1 else 0
    units = {host: units_of(config, host, is_first=host == first) for host in offered or [""]}
    own = {} if are_in_turns(config) else units
    leased = {host: sum(len(unit.devices) for unit in found if unit.kind == "gpu") for host, found in own.items()}
    room = {host: max(0, (num_gpus or len(shown)) - leased.get(host, 0)) for host in units}
    on_gpu = next((name for name, policy in config.policies.items() if policy.device == "cuda"), None)
    if on_gpu and not any(room.values()):
        raise _no_gpu(on_gpu, leased.get(here, 0), "" if here in room else here)
    seated = seats(config, room, {host: len(found) for host, found in units.items()})
    idle = [host for host in offered if not units[host] and all(seat.host != host for seat in seated.values())]
    if idle:
        raise ConfigError(
            "--hosts: some hosts have nothing to run",
            got=", ".join(idle),
            wanted=f"{len(hosts) - len(idle)} hosts, for {len(seated)} learners and workers",
            cure="name fewer hosts, raise rollout.workers, or add units of these hosts to allocation.units",
        )
    return seated


def _order(config: RunConfig, key: Key) -> tuple[int, int]:
    return list(config.policies).index(key[1]), key[2]


def _gpus_of(seat: ProcessPlacement, gpus: Sequence[str], here: str, policy: str) -> tuple[str, ...]:
    """Return the names of a seat's GPUs; () on another host, whose names are not known here."""
    if seat.host != here:
        return ()
    if any(place >= len(gpus) for place in seat.gpus):
        raise ConfigError(
            f"policies.{policy}: host {here} has fewer visible GPUs than the plan needs",
            got=f"{len(gpus)} outside allocation.units",
            wanted=f"at least {max(seat.gpus) + 1}",
            cure="set launch.gpus_per_host to the number of GPUs that every host with policies has",
        )
    return tuple(gpus[place] for place in seat.gpus)


def _no_gpu(policy: str, num_leased: int, first: str) -> ConfigError:
    if first:
        return ConfigError(
            "launch.gpus_per_host: required, as the first host runs only daemons and has no visible GPU",
            got=0,
            wanted="the number of GPUs of each other host",
            cure="set --launch.gpus_per_host to this number, for example 8",
        )
    if num_leased:
        return ConfigError(
            "allocation.units: the units leave no GPU for learners and frozen policies",
            got=f"units of all {num_leased} GPUs that are visible on this host",
            wanted=f'at least one GPU outside the units, for policies.{policy}.device = "cuda"',
            cure="remove a GPU from allocation.units, or make more GPUs visible",
        )
    return ConfigError(
        f"policies.{policy}.device: no GPU is visible on this host",
        got="cuda",
        cure=f'set policies.{policy}.device = "cpu", or make the GPUs visible',
    )


def _reach(config: RunConfig, policy: str, index: int, seated: Mapping[Key, ProcessPlacement]) -> dict[str, str]:
    """Return the variables by which a learner's ranks on one host choose network interfaces and find other ranks."""
    own = [seat.host for (role, name, _), seat in sorted(seated.items()) if (role, name) == ("learner", policy)]
    reaches_out, ranks = _broadcasts_far(config, policy, seated), config.policies[policy].learner.ranks_per_host
    stop_s = config.supervision.stop_s
    variables = torchrun_environment(ranks, stop_s=stop_s, reaches_out=reaches_out, is_spread=len(own) > 1)
    return variables | ({LEARNER_HOSTS: ",".join(own), LEARNER_PLACE: str(index)} if len(own) > 1 else {})


def _broadcasts_far(config: RunConfig, policy: str, seated: Mapping[Key, ProcessPlacement]) -> bool:
    """Whether a learner broadcasts weights to workers of other hosts."""
    hosts = {seat.host for (_, name, _), seat in seated.items() if name == policy}
    return config.policies[policy].rollout.weights == "broadcast" and len(hosts) > 1


def role_argv(role: Role, run_folder: Path, *, policy: str = "", index: int = 0) -> tuple[str, ...]:
    """Return the command of one role process."""
    whose = ("--policy", policy) if policy else ()
    place = ("--index", str(index)) if policy or index else ()
    return (*MRL, role, "--run-folder", str(run_folder), *whose, *place)


def environment(threads: int, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that every role process has in its environment."""
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",  # the order of sets, which some data sets depend on, is then the same everywhere
    }
    return variables | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def _join(host: Host, run_folder: Path, remote: Sequence[str], *, is_spared: bool) -> ProcessSpec:
    return ProcessSpec(
        name=f"{HOST_ROLE}/{host.name}",
        role=HOST_ROLE,
        policy="",
        index=0,
        argv=join_argv(host.name, run_folder, remote),
        restart="spared" if is_spared else "always",
    )


def _daemon(role: Literal["exchange", "allocator", "gateway"], run_folder: Path) -> ProcessSpec:
    argv = role_argv(role, run_folder)
    return ProcessSpec(name=role, role=role, policy="", index=0, argv=argv, env=environment(1))


def _learner(
    name: str,
    policy: PolicyTable,
    index: int,
    *,
    run_folder: Path,
    gpus: tuple[str, ...],
    reach: Mapping[str, str],
) -> ProcessSpec:
    """Return the process with a learner's ranks on one of its hosts; its name is that of the first of these ranks."""
    folder, per_host = RunFolder(run_folder), policy.learner.ranks_per_host
    torchrun = torchrun_argv(Path(LOCAL), policy=name, processes=per_host)  # `LIFE`, `LOCAL`: filled in at every start
    env = {**environment(policy.learner.threads, gpus), **reach}
    if policy.device == "cuda":
        env |= nccl_environment(folder.crash, name) | allocator_environment(os.environ)
    return ProcessSpec(
        name=rank_role(name, index * per_host),
        role="learner",
        policy=name,
        index=index,
        argv=(*torchrun, "-m", "mrl", "learner", "--run-folder", str(run_folder), "--policy", name),
        env=env,
        restart="until_done",
    )


def rank_role(policy: str, rank: int) -> str:
    """Return the name of the role of a learner's rank."""
    return f"learner/{policy}" + f"/rank{rank}" * bool(rank)


def _worker(name: str, policy: PolicyTable, index: int, *, run_folder: Path, gpus: tuple[str, ...]) -> ProcessSpec:
    return ProcessSpec(
        name=f"worker/{name}/{index}",
        role="worker",
        policy=name,
        index=index,
        argv=role_argv("worker", run_folder, policy=name, index=index),
        env=environment(policy.rollout.threads, gpus) | engine_environment(policy, os.environ),
    )


def unit_worker(
    config: RunConfig,
    run_folder: Path,
    unit: Unit,
    *,
    policy: str,
    epoch: int,
    gpus: Sequence[str],
) -> ProcessSpec:
    """Return the worker that a lease of `unit` under `epoch` starts.

    `gpus`: all GPUs that the unit's host shows, as CUDA names them; empty where they are not known.
    """
    index = config.allocation.units.index(unit.name)
    is_cpu = unit.kind == "cpu"
    threads = len(unit.devices) if is_cpu else config.policies[policy].rollout.threads
    env = environment(threads, [gpus[device] for device in unit.devices] if gpus and not is_cpu else [])
    env |= engine_environment(config.policies[policy], os.environ)
    env |= {UNIT: unit.name, UNIT_EPOCH: str(epoch), UNIT_RUN: str(run_folder.absolute()), UNIT_POLICY: policy}
    env[KEEPS_ENVIRONMENT] = "1"
    sleeps = may_sleep(config, policy)
    env |= {UNIT_LINE: "1"} if sleeps else {}
    env |= {CORES: ",".join(map(str, unit.devices))} if is_cpu else {}
    spec = ProcessSpec(
        name=f"worker/{policy}/{index}",
        role="worker",
        policy=policy,
        index=index,
        argv=role_argv("worker", run_folder, policy=policy, index=index),
        env=env,
        restart="leased",
        host=unit.host,
        has_line=sleeps,
    )
    return replace(spec, env=env | turn_environment(config, spec))


def planned(config: RunConfig) -> Plan:
    """Return the plan on this host, or, where it shows too few GPUs, on a host with as many as the run can use.

    Learners over several hosts are placed on as many hosts like this one.
    """
    here = visible_gpus(os.environ)
    gpus = here if len(here) >= least_gpus(config) else [str(number) for number in range(most_gpus(config))]
    num_hosts = max(config.policies[name].learner.hosts for name in config.learning)
    hosts = [Host(f"host-{number}") for number in range(1, num_hosts + 1)] if num_hosts > 1 else []
    return build_plan(config, run_folder_of(config).path, gpus=gpus, hosts=hosts)
