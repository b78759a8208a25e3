"""Place learners and workers on hosts and their GPUs. Pure, so that every host finds the same answer.

Learners are placed first, each whole on one host or with equally many ranks on each of its `hosts`; then servers, then
embedded engines. A server has its GPUs for itself: it takes most of their memory when it starts. A learner or an
embedded engine shares a GPU only where none is free. With `turns` the engines of a policy are on the GPUs of its
learner, or on leased units; learners may use the GPUs of these units, too, where no other is left.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from mrl.config.policy_tables import PolicyTable
from mrl.config.rules.unit_rules import are_in_turns, fitting_units
from mrl.config.schema import RunConfig
from mrl.config.unit_names import parse_units
from mrl.errors import ConfigError

Key = tuple[Literal["learner", "worker"], str, int]
"""(role, policy, index). The index of a worker is its number; that of a learner counts the learner's hosts."""


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Place of one process."""

    host: str
    gpus: tuple[int, ...] = ()
    """Positions among the GPUs that the host offers."""


def planned_workers(config: RunConfig, policy: str) -> int:
    """Return the number of workers that the plan starts; with units, leases start the workers of learning policies."""
    table = config.policies[policy]
    return 0 if config.allocation.units and not table.frozen else table.rollout.workers


def worker_gpus(policy: PolicyTable) -> int:
    """Return the number of GPUs that one worker needs with its engine; 0 with a server that the run does not start."""
    return policy.rollout.gpus if policy.device == "cuda" and not policy.rollout.server.url else 0


def server_gpus(config: RunConfig, name: str) -> int:
    """Return the most GPUs of a policy's server, also on a leased unit; 0 unless servers have GPUs of their own."""
    policy = config.policies[name]
    if not has_own_gpus(policy):
        return 0
    if name not in config.learning or not config.allocation.units:
        return worker_gpus(policy)
    fitting = fitting_units(config, name)
    units = parse_units(config.allocation.units)
    return max(len(unit.devices) for unit in units if unit.name in fitting)


def rank_gpus(policy: PolicyTable) -> int:
    """Return the number of GPUs that a policy's learner needs on each of its hosts, one for each rank."""
    return policy.learner.ranks_per_host if policy.device == "cuda" and not policy.frozen else 0


def has_own_gpus(policy: PolicyTable) -> bool:
    """Whether the engines of a policy are servers, which share their GPUs with no other process."""
    return policy.rollout.engine != "embedded" and worker_gpus(policy) > 0 and not policy.turns


def joins_learner(policy: PolicyTable) -> bool:
    """Whether the engines of a policy share the GPUs of its learner, in turns."""
    return policy.turns and rank_gpus(policy) > 0


def seats(
    config: RunConfig, room: Mapping[str, int], load: Mapping[str, int] | None = None
) -> dict[Key, ProcessPlacement]:
    """Return the seats of every learner, one on each of its hosts, and of every planned worker.

    `room`: host -> number of GPUs that it offers, for the hosts that policies live on, in their order. `load`: host ->
    number of other processes on it. Policies begin on the hosts in turn. A worker on GPUs goes to its policy's host
    while that has free GPUs, else to the host with most free GPUs. A worker on cores goes to the host with the fewest
    processes. Raises ConfigError, with counts that would fit, when a learner or a server cannot have the GPUs that it
    needs.
    """
    try:
        return _filled(config, room, load or {})
    except _FullError as full:
        raise _refusal(config, room, full) from None


class _FullError(Exception):
    """There is no room for the learner of a policy, or for one of its workers."""

    def __init__(self, name: str, role: str) -> None:
        super().__init__(name, role)
        self.name, self.role = name, role


def _filled(config: RunConfig, room: Mapping[str, int], load: Mapping[str, int]) -> dict[Key, ProcessPlacement]:
    """Return seats as `seats` does. Raises _FullError."""
    hall = _Hall(config, room, load)
    for place, name in enumerate(config.policies):
        hall.seat_home(name, place)
    workers = [(name, index) for name in config.policies for index in range(planned_workers(config, name))]
    workers.sort(key=lambda worker: worker[1])  # the first worker of every policy, then the second
    for name, index in sorted(workers, key=lambda worker: not has_own_gpus(config.policies[worker[0]])):
        hall.seat_worker(name, index)
    return hall.taken


class _Hall:
    """The seats taken so far."""

    def __init__(self, config: RunConfig, room: Mapping[str, int], load: Mapping[str, int]) -> None:
        self.taken: dict[Key, ProcessPlacement] = {}
        self._config, self._room, self._load = config, room, Counter(load)
        self._held: Counter[tuple[str, int]] = Counter()
        self._homes: dict[str, str] = {}
        self._shared_units = _leased_gpus(config) if are_in_turns(config) else []

    def seat_home(self, name: str, place: int) -> None:
        """Choose a policy's host, and seat its learner there and, if it needs several, on the hosts that come next."""
        hosts, policy = list(self._room), self._config.policies[name]
        turn = [hosts[(place + step) % len(hosts)] for step in range(len(hosts))]
        ranks, wanted = rank_gpus(policy), 1 if policy.frozen else policy.learner.hosts
        fits = [host for host in turn if len(self._free(host)) >= ranks]
        fits += [host for host in turn if host not in fits and self._room[host] >= ranks]
        if len(fits) < wanted:
            raise _FullError(name, "learner")
        self._homes[name] = fits[0]
        for index, host in enumerate(fits[:wanted]):
            self._load[host] += 1 if policy.frozen else policy.learner.ranks_per_host
            if not policy.frozen:
                self._take(("learner", name, index), host, self._least_held(host)[:ranks])

    def seat_worker(self, name: str, index: int) -> None:
        """Seat a worker on its policy's host or another."""
        policy, home = self._config.policies[name], self._homes[name]
        wanted = worker_gpus(policy)
        if joins_learner(policy):
            own = self.taken["learner", name, 0].gpus
            start = index * wanted % len(own)
            self._load[home] += 1
            self._take(("worker", name, index), home, own[start : start + wanted])
            return
        if not policy.frozen or index:  # `seat_home` has counted the first worker of a frozen policy
            host = home if wanted else min(self._room, key=lambda host: (self._load[host], host != home))
        else:
            host, self._load = home, self._load - Counter([home])
        gpus: Sequence[int] = self._free(host)[:wanted]
        if wanted and len(gpus) < wanted:
            host = max(self._room, key=lambda host: len(self._free(host)))
            gpus = self._free(host)[:wanted]
        if len(gpus) < wanted:
            if has_own_gpus(policy):
                raise _FullError(name, "worker")
            host, gpus = self._shared(name)
        self._load[host] += 1
        self._take(("worker", name, index), host, gpus)

    def _shared(self, name: str) -> tuple[str, list[int]]:
        """Return host and GPU for an embedded engine that has to share a GPU, on its policy's host if possible."""
        hosts = sorted(self._room, key=lambda host: host != self._homes[name])
        for host in hosts:
            if gpus := self._least_held(host):
                return host, gpus[:1]
        raise _FullError(name, "worker")

    def _take(self, key: Key, host: str, gpus: Sequence[int]) -> None:
        self.taken[key] = ProcessPlacement(host, tuple(gpus))
        self._held.update((host, gpu) for gpu in gpus)

    def _free(self, host: str) -> list[int]:
        return [gpu for gpu in range(self._room[host]) if not self._held[host, gpu]]

    def _least_held(self, host: str) -> list[int]:
        """Return the GPUs of a host that no server has, the least used first."""
        own = {
            (seat.host, gpu)
            for (role, name, _), seat in self.taken.items()
            if role == "worker" and has_own_gpus(self._config.policies[name])
            for gpu in seat.gpus
        }
        gpus = (gpu for gpu in range(self._room[host]) if (host, gpu) not in own)
        return sorted(gpus, key=lambda gpu: (self._held[host, gpu], gpu in self._shared_units))


def _refusal(config: RunConfig, room: Mapping[str, int], full: _FullError) -> ConfigError:
    here = f"{sum(room.values())} GPUs" + (f" on {len(room)} hosts" if len(room) > 1 else "")
    if full.role == "learner":
        return _too_few_for_learner(full.name, config.policies[full.name], room)
    ranks = sum(rank_gpus(policy) * policy.learner.hosts for policy in config.policies.values())
    engines = sum(planned_workers(config, name) * worker_gpus(policy) for name, policy in config.policies.items())
    return ConfigError(
        f"policies.{full.name}.rollout.workers: no GPU is left for the engine, and a server cannot share its GPU",
        got=f"{here}; learner ranks need {ranks}, engines {engines}",
        wanted=f"{ranks + engines} GPUs",
        cure=_smaller(config, room) or "use more GPUs, or the embedded engine, which can share one",
    )


def _too_few_for_learner(name: str, policy: PolicyTable, room: Mapping[str, int]) -> ConfigError:
    learner = policy.learner
    if learner.hosts > len(room):
        return ConfigError(
            f"policies.{name}.learner.hosts: the run has fewer hosts for policies",
            got=learner.hosts,
            wanted=f"<= {len(room)}",
            cure=""
            if len(room) > 1
            else f"name more hosts with `mrl launch CONFIG --hosts a,b`, or set policies.{name}.learner.hosts = 1",
        )
    if learner.hosts > 1:
        with_room = sum(gpus >= learner.ranks_per_host for gpus in room.values())
        return ConfigError(
            f"policies.{name}.learner.hosts: too few hosts with enough GPUs",
            got=f"{with_room} hosts with {learner.ranks_per_host} GPUs",
            wanted=f"{learner.hosts} such hosts for processes = {learner.processes}",
        )
    return ConfigError(
        f"policies.{name}.learner.processes: too few GPUs on one host",
        got=learner.processes,
        wanted=f"<= {max(room.values())}",
    )


def _smaller(config: RunConfig, room: Mapping[str, int]) -> str:
    """Return the largest numbers of ranks and of workers that would fit, as an instruction; "" where none fit."""
    most_ranks = max([1, *map(rank_gpus, config.policies.values())])
    most_workers = max(policy.rollout.workers for policy in config.policies.values())
    for ranks in range(most_ranks, 0, -1):
        for workers in range(most_workers, 0, -1):
            smaller = _with_at_most(config, ranks, workers)
            with suppress(_FullError):
                _filled(smaller, room, {})
                return "set " + ", ".join(_changes(config, smaller))
    return ""


def _with_at_most(config: RunConfig, ranks: int, workers: int) -> RunConfig:
    policies = {}
    for name, policy in config.policies.items():
        per_host = min(ranks, policy.learner.ranks_per_host)
        learner = policy.learner.model_copy(update={"processes": per_host * policy.learner.hosts})
        rollout = policy.rollout.model_copy(update={"workers": min(workers, policy.rollout.workers)})
        on_gpu = {"learner": learner, "rollout": rollout} if policy.device == "cuda" else {}
        policies[name] = policy.model_copy(update=on_gpu)
    return config.model_copy(update={"policies": policies})


def _changes(before: RunConfig, after: RunConfig) -> Iterator[str]:
    for name, policy in after.policies.items():
        old = before.policies[name]
        if rank_gpus(policy) != rank_gpus(old):
            yield f"policies.{name}.learner.processes = {policy.learner.processes}"
        if policy.rollout.workers != old.rollout.workers:
            yield f"policies.{name}.rollout.workers = {policy.rollout.workers}"


def least_gpus(config: RunConfig) -> int:
    """Return the fewest GPUs with which a host can start its part; beside servers each rank needs a GPU, too."""
    own = [name for name, policy in config.policies.items() if has_own_gpus(policy) and planned_workers(config, name)]
    on_gpu = [policy for policy in config.policies.values() if policy.device == "cuda"]
    ranks = [rank_gpus(policy) for policy in on_gpu]
    shared = sum(ranks) if own else max(ranks, default=0)
    servers = sum(planned_workers(config, name) * worker_gpus(config.policies[name]) for name in own)
    leased = _leased_gpus(config)
    engines_alone = 0 if are_in_turns(config) else len(leased)
    return max([max(shared + servers, bool(on_gpu)) + engines_alone, *(number + 1 for number in leased)])


def most_gpus(config: RunConfig) -> int:
    """Return the number of GPUs with which each rank and each worker on a host has GPUs of its own."""
    on_gpu = {name: policy for name, policy in config.policies.items() if policy.device == "cuda"}
    apart = {name: policy for name, policy in on_gpu.items() if not joins_learner(policy)}
    workers = sum(planned_workers(config, name) * worker_gpus(policy) for name, policy in apart.items())
    learners = sum(map(rank_gpus, on_gpu.values()))
    leased = 0 if are_in_turns(config) else len(_leased_gpus(config))
    return max(least_gpus(config), workers + learners + leased)


def _leased_gpus(config: RunConfig) -> list[int]:
    """Return the GPUs of this host that belong to units, as positions among the GPUs that it shows."""
    units = parse_units(config.allocation.units)
    return [device for unit in units if unit.kind == "gpu" and not unit.host for device in unit.devices]
