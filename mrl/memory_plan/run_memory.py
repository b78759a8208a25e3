"""The memory plan of a configuration: the need of each process, from the shapes of models, never their weights."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mrl.config.memory_savings import shortest_cure
from mrl.config.policy_tables import LearnerTable
from mrl.config.rules.unit_rules import may_sleep
from mrl.config.schema import RunConfig, TrackerTable
from mrl.config.unit_names import parse_units
from mrl.errors import ConfigError
from mrl.memory_plan.needs import (
    AGENT_MIB,
    DAEMON_MIB,
    MIB,
    TRACKER_MIB,
    Need,
    at_worst_turn,
    on_gpu_with,
    resting_on_gpu,
)
from mrl.memory_plan.policy_memory import PolicyMemory
from mrl.processes.planning.placement import least_gpus, most_gpus
from mrl.processes.planning.plan import Plan, ProcessSpec, planned
from mrl.processes.planning.time_sharing import turn_devices
from mrl.processes.planning.unit_workers import UNIT
from mrl.processes.preparation.comparison_training import RunNeed
from mrl.processes.trackers import labelled

IN_MAIN_MEMORY = ("parameters", "optimizer", "reference")
"""Parts of a learner that leave its GPU between two turns; gradients are dropped."""


@dataclass(frozen=True, slots=True)
class ProcessNeed:
    """Need of one process of the plan: on the host that of all its ranks and torchrun together, on a GPU that of each
    rank.
    """

    spec: ProcessSpec
    host: Need
    """Need of the first rank on the host."""
    count: int = 1
    """Number of its processes: the ranks of a learner."""
    agent_mib: float = 0.0
    device: Need | None = None
    other: Need | None = None
    """Need of every further rank on the host; None where it is that of the first."""

    @property
    def host_mib(self) -> float:
        """MiB of all of its processes together, on the host."""
        return self.agent_mib + self.host.mib + (self.count - 1) * (self.other or self.host).mib


def memory_plan(config: RunConfig, plan: Plan, policies: Mapping[str, PolicyMemory] | None = None) -> list[ProcessNeed]:
    """Return the need of every process of the plan, of the engines that take turns on its units, and of the trackers on
    the first host.

    The weights of no model are read, and none need be there. `policies` may have been looked at before.
    """
    policies = policies or {name: PolicyMemory(config, name) for name in config.policies}
    needs = [_need(config, spec, policies) for spec in plan.processes]
    for _, specs in itertools.groupby(plan.leased, key=lambda spec: spec.env[UNIT]):
        needs += _on_unit(config, list(specs), policies)
    return needs + [_tracker(label, table, plan.first_host) for label, table in labelled(config.trackers)]


def run_need(config: RunConfig) -> RunNeed:
    """Return the need of a whole run by the plan that `mrl check` shows, on its first host."""
    plan = planned(config)
    host_mib = sum(need.host_mib for need in memory_plan(config, plan) if need.spec.host == plan.first_host)
    names_cores = any(unit.kind == "cpu" for unit in parse_units(config.allocation.units))
    names_ports = config.exchange.port > 0 or config.exchange.metrics_port > 0
    return RunNeed(
        len(config.policies), host_mib, least_gpus(config), most_gpus(config), is_alone=names_cores or names_ports
    )


def check_sleepers(config: RunConfig, plan: Plan, *, host_mib: float, where: str) -> None:
    """Raises ConfigError where engines that sleep, with all that runs beside them on the first host, are too much."""
    if not any(may_sleep(config, spec.policy) for spec in plan.leased):
        return
    needs = [need for need in memory_plan(config, plan) if need.spec.host == plan.first_host]
    wanted_mib = sum(need.host_mib for need in needs)
    if wanted_mib > host_mib:
        leased_mib = sum(need.host_mib for need in needs if UNIT in need.spec.env)
        raise ConfigError(
            'allocation.residency = "sleep": sleeping engines and running processes do not fit into main memory',
            where=where,
            got=f"{wanted_mib:.0f} MiB, {leased_mib:.0f} of them for engines on units",
            wanted=f"at most {host_mib:.0f} MiB",
            cure='set allocation.residency = "stop", or use fewer units',
        )


def too_little(
    config: RunConfig, needs: list[ProcessNeed], host_mib: float, device_mib: Mapping[str, float]
) -> Iterator[str]:
    """Yield lines that name what will not fit, and the setting to change. `device_mib` holds the sizes of the known
    GPUs.
    """
    on_host = sum(need.host_mib for need in needs)
    if on_host > host_mib:
        largest = max(needs, key=lambda need: need.host_mib)
        room_mib = largest.host_mib - (on_host - host_mib)
        yield f"memory: {on_host:.0f} MiB will not fit into the {host_mib:.0f} MiB of this host"
        room_mib = (room_mib - largest.agent_mib) / largest.count
        yield f"  cure: {_cure(config, largest, room_mib, on_device=False)}"
    told: dict[str, str] = {}
    for device, wanted_mib in by_device(needs).items():
        if wanted_mib > device_mib.get(device, float("inf")):
            yield f"cuda {device}: {wanted_mib:.0f} MiB will not fit into its {device_mib[device]:.0f} MiB"
            on_it = [(need.device.mib, need) for need in needs if need.device and device in _devices(need.spec)]
            largest_mib, largest = max(on_it, key=lambda one: one[0])
            if largest.spec.name not in told:  # its other ranks need the same
                room_mib = device_mib[device] - (wanted_mib - largest_mib)
                told[largest.spec.name] = _cure(config, largest, room_mib, on_device=True)
    yield from (f"  cure: {cure}" for cure in told.values())


def by_device(needs: list[ProcessNeed]) -> dict[str, float]:
    """Return GPU -> MiB that the plan needs there; of processes that have the GPU in turns, the largest and what the
    others keep.
    """
    beside: defaultdict[str, float] = defaultdict(float)
    in_turns: defaultdict[str, list[tuple[Need, Need]]] = defaultdict(list)
    for need in needs:
        for device in _devices(need.spec) if need.device else ():
            assert need.device is not None
            if turn_devices(need.spec.env):
                in_turns[device].append((need.device, resting_on_gpu(need.device)))
            else:
                beside[device] += need.device.mib
    turns = {device: sum(one.mib for one in at_worst_turn(engines)) for device, engines in in_turns.items()}
    return {device: beside[device] + turns.get(device, 0.0) for device in sorted(beside.keys() | turns.keys())}


def _devices(spec: ProcessSpec) -> list[str]:
    return [device for device in spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]


def _need(config: RunConfig, spec: ProcessSpec, policies: Mapping[str, PolicyMemory]) -> ProcessNeed:
    if spec.role == "learner":
        policy = policies[spec.policy]
        (host, device), (other, _) = policy.ranks(policy.table.learner)
        on_gpu = on_gpu_with(device) if policy.table.device == "cuda" else None
        if on_gpu and policy.table.turns:
            host, other = (_with_waiting(need, device, IN_MAIN_MEMORY) for need in (host, other))
        first = other if spec.index and other else host  # the first rank of all is on the first of its hosts
        ranks = policy.table.learner.ranks_per_host
        return ProcessNeed(spec, first, ranks, AGENT_MIB if ranks > 1 else 0.0, on_gpu, other)
    if spec.role == "worker":
        return _worker(spec, policies[spec.policy])
    return ProcessNeed(spec, Need("", {"process": DAEMON_MIB * MIB}))


def _with_waiting(host: Need, device: Need, parts: Sequence[str]) -> Need:
    """Return the host's need with copies of the parts that leave a GPU between two turns, in locked memory, which
    stays.
    """
    return Need(host.moment, host.parts | {"between turns": sum(device.parts.get(part, 0.0) for part in parts)})


def _tracker(label: str, table: TrackerTable, first_host: str) -> ProcessNeed:
    """Return the need of a tracker's process, which the supervisor starts itself and which is in no plan."""
    spec = ProcessSpec(f"tracker/{label}", "tracker", "", 0, (), {"OMP_NUM_THREADS": "1"}, host=first_host)
    return ProcessNeed(spec, Need("", {"process": TRACKER_MIB.get(table.kind, max(TRACKER_MIB.values())) * MIB}))


def _worker(spec: ProcessSpec, policy: PolicyMemory) -> ProcessNeed:
    gpus = max(1, len(_devices(spec)))
    host, engine = policy.process(), policy.engine(gpus).parts
    if policy.table.turns and policy.table.device == "cuda":
        waiting = engine | {"weights": policy.resting(is_asleep=True).parts.get("weights", 0.0)}
        host = _with_waiting(Need("", host), Need("", waiting), ("weights", "key-value cache")).parts
    on_gpu, processes = policy.table.device == "cuda", policy.server_processes(gpus)
    host |= policy.arriving_weights() | (processes if on_gpu else processes | engine)
    device = Need("sampling", engine) if on_gpu and engine else None
    if device and not processes:
        device = on_gpu_with(device)
    return ProcessNeed(spec, Need("sampling", host), device=device)


def _on_unit(config: RunConfig, specs: list[ProcessSpec], policies: Mapping[str, PolicyMemory]) -> list[ProcessNeed]:
    """Return the needs of engines that take turns on one unit; host and GPU may be fullest at different turns."""
    turns = [_worker(spec, policies[spec.policy]) for spec in specs]
    rests = [policies[spec.policy].resting(is_asleep=may_sleep(config, spec.policy)) for spec in specs]
    hosts = at_worst_turn([(turn.host, rest) for turn, rest in zip(turns, rests, strict=True)])
    gone = Need("", {})
    on_gpu = [turn.device or gone for turn in turns]
    kept = [
        resting_on_gpu(one) if may_sleep(config, spec.policy) else gone for one, spec in zip(on_gpu, specs, strict=True)
    ]
    devices = at_worst_turn(list(zip(on_gpu, kept, strict=True)))
    return [
        ProcessNeed(spec, host, device=device if device.parts else None)
        for spec, host, device in zip(specs, hosts, devices, strict=True)
    ]


def _cure(config: RunConfig, need: ProcessNeed, room_mib: float, *, on_device: bool) -> str:
    """Return the cure for a process that has `room_mib` on its GPU, or on the host."""
    if need.spec.role == "learner":
        policy = PolicyMemory(config, need.spec.policy)

        def needed_mib(table: LearnerTable) -> float:
            host, device = policy.ranks(table)[0]
            return on_gpu_with(device).mib if on_device else host.mib

        cure = shortest_cure(needed_mib, policy.table.learner, room_mib, on_device=on_device)
        return f"policies.{policy.name}: {cure}"
    if UNIT in need.spec.env and not on_device:
        return f"{need.spec.name}: use fewer units" + ', or set allocation.residency = "stop"' * may_sleep(
            config, need.spec.policy
        )
    parts = (need.device or need.host).parts
    if parts.get("key-value cache", 0.0) > parts.get("weights", 0.0):
        policy = PolicyMemory(config, need.spec.policy)
        for answers in policy.fewer_answers():
            told = _need(config, need.spec, {policy.name: policy.with_answers(answers)})
            mib = told.device.mib if told.device and on_device else told.host_mib
            if mib <= room_mib:
                return f"policies.{policy.name}: set rollout.answers_at_once = {answers}, which needs {mib:.0f} MiB"
        return f"policies.{policy.name}: lower rollout.max_new_tokens or rollout.group_size"
    return f"{need.spec.name}: put fewer processes on this device (rollout.workers), or use a smaller model"
