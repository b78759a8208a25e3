"""The node of a host: carries out the allocator's orders on the host's units (GPUs or cores that run one engine).

The node lives inside the host's supervisor, since only the parent of processes can prove that they are gone.
`mrl.allocation.node_guard` decides, without a process in sight; the node acts and looks.
"""

import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from mrl.allocation.node_guard import Action, NodeGuard, Seen
from mrl.config.rules.unit_rules import are_in_turns
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.config.unit_names import Unit
from mrl.config.unit_types import seen_type
from mrl.processes import role_runtime
from mrl.processes.host_processes import HostProcesses
from mrl.processes.planning.devices import visible_gpus
from mrl.processes.planning.lifecycle import Lifecycle
from mrl.processes.planning.plan import HOST_ROLE, unit_worker
from mrl.processes.planning.unit_workers import UNIT, UNIT_POLICY, UNIT_RUN, units_of
from mrl.processes.sleep_channel import ASLEEP, AWAKE, SLEEP, SLEEPLESS, WAKE
from mrl.processes.unit_memory import UnitMemory, gpu_models
from mrl.records.codec import encode
from mrl.records.unit_messages import NodeOrders, NodeReport, node_orders_decoder
from mrl.transport.requests import RequestLink, Requests

REPORT_S = 0.25


def lease_units(
    config: RunConfig,
    folder: RunFolder,
    processes: HostProcesses,
    lifecycle: Lifecycle,
    *,
    host: str,
    is_first: bool,
    closing: ExitStack,
) -> None:
    """Make the node of this host's units, if it has units, and call it in every turn of the host's supervisor."""
    units = units_of(config, host, is_first=is_first)
    if units:
        gpus = visible_gpus(os.environ)
        node = UnitNode(config, folder, units, processes, lifecycle, host=host, gpus=gpus, closing=closing)
        processes.every_turn(node.turn)


class UnitNode:
    """Starts, ends and reports the workers on this host's units; the allocator orders, the guard allows."""

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
        """Unit -> policy -> name of the worker that was started on the unit."""
        self._asleep: set[str] = set()
        """Names of workers that said that their engines sleep."""
        self._proved: set[str] = set()
        """Names among `_asleep` on whose unit the memory of the GPUs was found free since."""
        # A learner that shares the unit's GPU in turns holds memory there, too: an engine cannot give that back.
        alone = [] if are_in_turns(config) else [unit for unit in units if unit.kind == "gpu"]
        self._memory = {unit.name: UnitMemory(_gpus_of(unit, gpus)) for unit in alone}
        self._orders: deque[NodeOrders] = deque(maxlen=16)
        self._told: NodeReport | None = None
        self._told_s = time.monotonic()
        self._requests = RequestLink("allocator", Requests())
        identity = f"{HOST_ROLE}/{host}/units" if host else f"{HOST_ROLE}/units"
        client = role_runtime.link(
            folder,
            "allocator",
            identity=identity,
            on_message=self._take,
            on_tick=self._requests.on_tick,
            closing=closing,
        )
        self._requests.open(client.post, client.restart)

    def turn(self, now_s: float) -> None:
        """Obey orders, act, and report; called in every turn. Raises OSError when a process cannot be started."""
        released = self._released()
        self._end_sleepers(released)
        if self._lifecycle.phase == "stopping":
            return
        self._listen()
        while self._orders:
            self._act(self._guard.obey(self._orders.popleft(), now_s), now_s)
        self._act(self._guard.step(now_s, self._look), now_s)
        self._report(now_s, released)

    def _take(self, body: bytes) -> None:
        """Keep orders for the next turn; called on the link's thread."""
        orders = self._requests.read(body, node_orders_decoder)
        if orders is not None:  # else the allocator sends them again
            self._orders.append(orders)
            self._requests.answered(self._requests.core.newest_report, time.monotonic())

    def _act(self, actions: Sequence[Action], now_s: float) -> None:
        for action in actions:
            match action.kind:
                case "start":
                    self._start(action, now_s)
                case "wake":
                    self._wake(action)
                case "sleep":
                    self._processes.say(self._workers[action.unit][action.policy], SLEEP)
                case "end":
                    self._processes.dismiss(self._workers[action.unit][action.policy], signal.SIGTERM)
                case "kill":
                    self._kill(action.unit, now_s)

    def _listen(self) -> None:
        """Read the workers' messages about the sleep of their engines."""
        for unit, workers in self._workers.items():
            for policy, name in workers.items():
                for words in self._processes.heard_from(name):
                    self._hear(unit, policy, words)

    def _hear(self, unit: str, policy: str, words: str) -> None:
        name, (word, _, epoch) = self._workers[unit][policy], words.partition(" ")
        if word == ASLEEP:
            self._asleep.add(name)
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
        self._forget_sleep(spec.name)
        self._processes.place(spec, now_s)

    def _wake(self, action: Action) -> None:
        """Tell the engine to wake up; the guard orders a kill when that takes too long."""
        name = self._workers[action.unit][action.policy]
        self._forget_sleep(name)
        self._processes.say(name, WAKE, action.epoch)

    def _kill(self, unit: str, now_s: float) -> None:
        """Kill every process on a unit that does not sleep: workers' groups, descendants, and whatever these started.

        Engines that are proved to sleep are spared, unless memory of the unit's GPUs stayed in use for too long since.
        """
        is_kept = unit in self._memory and self._memory[unit].is_kept(now_s)
        spared = {policy for policy, name in self._workers[unit].items() if self._is_proved(name) and not is_kept}
        for policy in self._workers[unit].keys() - spared:
            self._end(self._workers[unit][policy])
        for policy, pids in self._on_unit(unit).items():
            for pid in pids if policy not in spared else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _is_proved(self, name: str) -> bool:
        return name in self._proved and self._processes.is_there(name)

    def _end(self, name: str) -> None:
        self._forget_sleep(name)
        self._processes.dismiss(name, signal.SIGKILL)

    def _forget_sleep(self, name: str) -> None:
        self._asleep.discard(name)
        self._proved.discard(name)

    def _end_sleepers(self, released: Sequence[str]) -> None:
        """End the sleeping engines of released policies: no order will wake them."""
        for workers in self._workers.values():
            for policy, name in workers.items():
                if name in self._asleep and policy in released:
                    self._end(name)

    def _look(self, unit: str) -> Seen:
        """Return whether a unit is quiet, and the policies whose engines sleep there.

        Quiet: every worker sleeps or is reaped, its descendants are gone, and the memory of the GPUs is free. A
        worker's own message alone is no proof that its engine sleeps.
        """
        found, workers = self._on_unit(unit), self._workers[unit]
        there = {policy for policy, name in workers.items() if self._processes.is_there(name)}
        asleep = frozenset(policy for policy in there & found.keys() if workers[policy] in self._asleep)
        is_quiet = (there | found.keys()) <= asleep and self._is_given_back(unit, len(asleep))
        if is_quiet:
            self._proved |= {workers[policy] for policy in asleep}
        return Seen(is_quiet, asleep)

    def _is_given_back(self, unit: str, num_sleepers: int) -> bool:
        memory = self._memory.get(unit)
        return memory is None or memory.is_given_back(time.monotonic(), num_sleepers=num_sleepers)

    def _on_unit(self, unit: str) -> dict[str, list[int]]:
        """Return policy -> pids of all its processes on a unit."""
        return processes_on(unit, self._folder.path)

    def _report(self, now_s: float, released: Sequence[str]) -> None:
        report = self._guard.report(released, self._failed(now_s))
        if report == self._told and now_s - self._told_s < REPORT_S:
            return
        self._told, self._told_s = report, now_s
        self._requests.report(encode(report), now_s)

    def _failed(self, now_s: float) -> dict[str, str]:
        """Return unit -> policy whose engine failed there too often and is not restarted for now."""
        return {
            unit: policy
            for unit, workers in self._workers.items()
            for policy, name in workers.items()
            if self._processes.is_given_up(name, now_s)
        }

    def _released(self) -> list[str]:
        """Return the policies that need no engine any more."""
        lifecycle, learning = self._lifecycle, self._config.learning
        if lifecycle.phase != "running":
            return list(learning)
        return [name for name in learning if name in lifecycle.stopped or f"learner/{name}" in lifecycle.done]


def processes_on(unit: str, run_folder: Path) -> dict[str, list[int]]:
    """Return policy -> pids of all its processes on a unit, found by the environment that they were started with.

    Every descendant inherits that environment, also a descendant that leads a session of its own, or whose parent has
    died. A process that has ended and is not yet reaped does not count: it holds no resources.
    """
    started_with = {UNIT: unit, UNIT_RUN: str(run_folder.absolute())}.items()
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:  # of another user, or gone
            continue
        if started_with <= environment.items():
            found.setdefault(environment.get(UNIT_POLICY, ""), []).append(process.pid)
    return found


def _gpus_of(unit: Unit, gpus: Sequence[str]) -> list[str]:
    return [gpus[device] for device in unit.devices] if unit.kind == "gpu" else []
