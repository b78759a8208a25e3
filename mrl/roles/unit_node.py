"""The shell of a host's unit guard, inside its supervisor: only who starts and reaps processes can prove them gone."""

import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import ExitStack

from mrl.allocation.guard import Action, NodeGuard, Seen
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.config.unit_types import seen_type
from mrl.config.units import Unit
from mrl.launch.devices import visible_gpus
from mrl.launch.lifecycle import Lifecycle
from mrl.launch.plan import HOST_ROLE, unit_worker
from mrl.launch.sleep_line import ASLEEP, AWAKE, SLEEP, SLEEPLESS, WAKE
from mrl.launch.unit_workers import UNIT, UNIT_POLICY, UNIT_RUN, units_of
from mrl.records.codec import encode
from mrl.records.units import NodeOrders, NodeReport, node_orders_decoder
from mrl.roles import wiring
from mrl.roles.host_processes import HostProcesses
from mrl.roles.residents import gpu_models, grouped_by, used_gpu_mib
from mrl.roles.sleepers import Sleepers, send
from mrl.transport.requests import RequestLink, Requests

REPORT_S = 0.25
MEMORY_EVERY_S = 1.0
SPARE_MIB = 512
"""What a GPU may hold beyond what it held at first and still count as empty."""
SLEEPER_MIB = 2048
"""What an engine that sleeps may hold of a GPU: its context and its graphs, but no weights and no cache."""


def lease_units(
    config: RunConfig,
    folder: RunFolder,
    processes: HostProcesses,
    lifecycle: Lifecycle,
    host: str,
    closing: ExitStack,
    *,
    is_first: bool,
) -> None:
    """Give this host's units, if it has any, a node that has a part in every turn of its supervisor."""
    units = units_of(config, host, is_first=is_first)
    if units:
        gpus = visible_gpus(os.environ)
        node = UnitNode(config, folder, units, processes, lifecycle, host=host, gpus=gpus, closing=closing)
        processes.every_turn(node.turn)


class UnitNode:
    """Starts, ends and reports the workers on this host's units, as the allocator orders and the guard allows."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        units: Sequence[Unit],
        processes: HostProcesses,
        lifecycle: Lifecycle,
        *,
        host: str = "",
        gpus: Sequence[str] = (),
        closing: ExitStack,
    ) -> None:
        self._config, self._folder, self._processes, self._lifecycle = config, folder, processes, lifecycle
        self._units = {unit.name: unit for unit in units}
        self._gpus = gpus
        types = {unit.name: seen_type(unit, gpu_models(_gpus_of(unit, gpus))) for unit in units}
        self._guard = NodeGuard(host or HOST_ROLE, self._units, wake_s=config.allocation.wake_s, types=types)
        self._workers: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """Unit -> policy -> the process that was placed there."""
        self._sleepers = Sleepers()
        self._memory = {unit.name: _Memory(_gpus_of(unit, gpus)) for unit in units if unit.kind == "gpu"}
        self._orders: deque[NodeOrders] = deque(maxlen=16)
        self._told: NodeReport | None = None
        self._told_s = time.monotonic()
        self._requests = RequestLink("allocator", Requests())
        identity = f"{HOST_ROLE}/{host}/units" if host else f"{HOST_ROLE}/units"
        client = wiring.link(
            folder,
            "allocator",
            identity=identity,
            on_message=self._take,
            on_tick=self._requests.on_tick,
            closing=closing,
        )
        self._requests.open(client.post, client.restart)

    def turn(self, now_s: float) -> None:
        """Obey, act, and report; to be called every turn. Raises OSError as the start of a process does."""
        released = self._released()
        self._end_sleepers(released)
        if self._lifecycle.phase == "stopping":
            return
        self._listen(now_s)
        while self._orders:
            self._act(self._guard.obey(self._orders.popleft(), now_s), now_s)
        self._act(self._guard.step(now_s, self._look), now_s)
        self._report(now_s, released)

    def _take(self, body: bytes) -> None:
        """On the link's thread."""
        orders = self._requests.read(body, node_orders_decoder)
        if orders is not None:  # else the allocator says it again
            self._orders.append(orders)
            self._requests.answered(self._requests.core.newest_report, time.monotonic())

    def _act(self, actions: Sequence[Action], now_s: float) -> None:
        for action in actions:
            match action.kind:
                case "start":
                    self._start(action, now_s)
                case "wake":
                    self._wake(action, now_s)
                case "sleep":
                    self._processes.say(self._workers[action.unit][action.policy], SLEEP)
                case "end":
                    self._processes.dismiss(self._workers[action.unit][action.policy], signal.SIGTERM)
                case "kill":
                    self._kill(action.unit)

    def _listen(self, now_s: float) -> None:
        """To what workers say about their sleep."""
        for unit, workers in self._workers.items():
            for policy, name in workers.items():
                for words in self._processes.heard_from(name):
                    self._hear(unit, policy, words, now_s)

    def _hear(self, unit: str, policy: str, words: str, now_s: float) -> None:
        name, (word, _, epoch) = self._workers[unit][policy], words.partition(" ")
        if word == ASLEEP:
            self._sleepers.add(name)
            self._processes.sleeps(name, now_s, sleeps=True)
        elif word == AWAKE and epoch.isdigit():
            self._guard.woke(unit, int(epoch))
        elif word == SLEEPLESS:
            self._guard.could_not_sleep(unit)
            self._processes.dismiss(name, signal.SIGTERM)

    def _start(self, action: Action, now_s: float) -> None:
        spec = unit_worker(
            self._config,
            self._folder.path,
            self._units[action.unit],
            policy=action.policy,
            epoch=action.epoch,
            gpus=self._gpus,
        )
        self._workers[action.unit][action.policy] = spec.name
        self._sleepers.remove(spec.name)
        self._processes.place(spec, now_s)

    def _wake(self, action: Action, now_s: float) -> None:
        """Only then is it let run; what does not hear it is killed when its time to wake up is over."""
        name = self._workers[action.unit][action.policy]
        self._sleepers.remove(name)
        self._processes.sleeps(name, now_s, sleeps=False)
        self._processes.say(name, WAKE, action.epoch)
        for pid in self._on_unit(action.unit).get(action.policy, ()):
            send(pid, signal.SIGCONT)

    def _kill(self, unit: str) -> None:
        """All that does not sleep: workers' groups and descendants, and whatever else was started from them.

        A sleeper that a stranger lets run is stopped again as soon as it is looked at: it need not be killed.
        """
        spared = {policy for policy, name in self._workers[unit].items() if self._is_sleeper(name)}
        for policy in self._workers[unit].keys() - spared:
            self._end(self._workers[unit][policy])
        for policy, pids in self._on_unit(unit).items():
            for pid in pids if policy not in spared else ():
                send(pid, signal.SIGKILL)

    def _is_sleeper(self, name: str) -> bool:
        return name in self._sleepers and self._processes.is_there(name)

    def _end(self, name: str) -> None:
        self._sleepers.remove(name)
        self._processes.dismiss(name, signal.SIGKILL)

    def _end_sleepers(self, released: Sequence[str]) -> None:
        """Those that nobody will wake any more. They hold nothing that has to be brought to an end."""
        for workers in self._workers.values():
            for policy, name in workers.items():
                if name in self._sleepers and policy in released:
                    self._end(name)

    def _look(self, unit: str) -> Seen:
        """Quiet: workers that do not sleep are reaped, what descends from them is gone, the GPUs' memory given back."""
        found, workers = self._on_unit(unit), self._workers[unit]
        there = {policy for policy, name in workers.items() if self._processes.is_there(name)}
        asleep = frozenset(
            policy for policy in there & found.keys() if self._sleepers.is_stopped(workers[policy], found[policy])
        )
        is_quiet = (there | found.keys()) <= asleep and (
            unit not in self._memory or self._memory[unit].is_free(time.monotonic(), num_sleepers=len(asleep))
        )
        return Seen(is_quiet, asleep)

    def _on_unit(self, unit: str) -> dict[str, list[int]]:
        """Policy -> all processes on a unit."""
        return grouped_by(UNIT_POLICY, self._mark(unit))

    def _mark(self, unit: str) -> dict[str, str]:
        return {UNIT: unit, UNIT_RUN: str(self._folder.path.absolute())}

    def _report(self, now_s: float, released: Sequence[str]) -> None:
        report = self._guard.report(released, self._failed(now_s))
        if report == self._told and now_s - self._told_s < REPORT_S:
            return
        self._told, self._told_s = report, now_s
        self._requests.report(encode(report), now_s)

    def _failed(self, now_s: float) -> dict[str, str]:
        """Unit -> policy whose engine failed there again and again and is left alone for now."""
        return {
            unit: policy
            for unit, workers in self._workers.items()
            for policy, name in workers.items()
            if self._processes.is_given_up(name, now_s)
        }

    def _released(self) -> list[str]:
        """Policies that need no engine any more."""
        lifecycle, learning = self._lifecycle, self._config.learning
        if lifecycle.phase != "running":
            return list(learning)
        return [name for name in learning if name in lifecycle.stopped or f"learner/{name}" in lifecycle.done]


def _gpus_of(unit: Unit, gpus: Sequence[str]) -> list[str]:
    return [gpus[device] for device in unit.devices] if unit.kind == "gpu" else []


class _Memory:
    """What a unit's GPUs hold, against what they held at first. A driver that said no is asked again a second later."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus
        self._first_mib = used_gpu_mib(gpus)
        self._refused_s = -MEMORY_EVERY_S

    def is_free(self, now_s: float, *, num_sleepers: int) -> bool:
        """Whether all is given back but what so many sleepers keep.

        Where the driver does not answer, that no process is left, or runs, has to do.
        """
        if self._first_mib is None:
            return True
        if now_s - self._refused_s < MEMORY_EVERY_S:
            return False
        now_mib = used_gpu_mib(self._gpus)
        spare_mib = SPARE_MIB + num_sleepers * SLEEPER_MIB
        is_free = now_mib is None or all(
            held <= first + spare_mib for held, first in zip(now_mib, self._first_mib, strict=True)
        )
        self._refused_s = self._refused_s if is_free else now_s
        return is_free
