"""The shell of a host's unit guard, inside its supervisor: only who starts and reaps processes can prove them gone."""

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from mrl.allocation.guard import Action, NodeGuard
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.config.units import Unit
from mrl.errors import RecordError
from mrl.launch.devices import visible_gpus
from mrl.launch.lifecycle import Lifecycle
from mrl.launch.plan import HOST_ROLE
from mrl.launch.unit_workers import UNIT, UNIT_RUN, unit_worker, units_of
from mrl.records.codec import decode, encode
from mrl.records.units import NodeOrders, NodeReport, node_orders_decoder
from mrl.roles import wiring
from mrl.roles.host_processes import HostProcesses
from mrl.roles.residents import processes_with, used_gpu_mib

REPORT_S = 0.25
LOOK_AGAIN_S = 3.0
"""After so long without an answer, the allocator's address is looked up again."""
MEMORY_EVERY_S = 1.0
SPARE_MIB = 512
"""What a GPU may hold beyond what it held at first and still count as empty."""


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
        self._guard = NodeGuard(host or HOST_ROLE, self._units)
        self._workers: dict[str, str] = {}
        """Unit -> the process placed there last."""
        self._memory = {unit.name: _Memory([gpus[device] for device in unit.devices])
                        for unit in units if unit.kind == "gpu"}  # fmt: skip
        self._orders: deque[NodeOrders] = deque(maxlen=16)
        self._told: NodeReport | None = None
        self._told_s = self._heard_s = time.monotonic()
        identity = f"{HOST_ROLE}/{host}/units" if host else f"{HOST_ROLE}/units"
        self._client = wiring.link(folder, "allocator", identity=identity, on_message=self._take, closing=closing)

    def turn(self, now_s: float) -> None:
        """Obey, act, and report; to be called every turn. Raises OSError as the start of a process does."""
        if self._lifecycle.phase == "stopping":
            return
        while self._orders:
            self._act(self._guard.obey(self._orders.popleft(), now_s), now_s)
        self._act(self._guard.step(now_s, self._is_empty), now_s)
        self._report(now_s)

    def _take(self, body: bytes) -> None:
        """On the link's thread."""
        with contextlib.suppress(RecordError):  # the allocator says it again
            self._orders.append(decode(body, node_orders_decoder))
            self._heard_s = time.monotonic()

    def _act(self, actions: Sequence[Action], now_s: float) -> None:
        for action in actions:
            if action.kind == "start":
                self._start(action, now_s)
            elif action.kind == "end":
                self._processes.dismiss(self._workers[action.unit], signal.SIGTERM)
            else:
                self._kill(action.unit)

    def _start(self, action: Action, now_s: float) -> None:
        spec = unit_worker(
            self._config,
            self._folder.path,
            self._units[action.unit],
            policy=action.policy,
            epoch=action.epoch,
            gpus=self._gpus,
        )
        self._workers[action.unit] = spec.name
        self._processes.place(spec, now_s)

    def _kill(self, unit: str) -> None:
        """The worker's group and its descendants, and whatever else was started from it."""
        if unit in self._workers:
            self._processes.dismiss(self._workers[unit], signal.SIGKILL)
        for pid in processes_with(self._mark(unit)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_empty(self, unit: str) -> bool:
        """The worker reaped, no process left that descends from it, and the memory of its GPUs given back."""
        if unit in self._workers and self._processes.is_there(self._workers[unit]):
            return False
        if processes_with(self._mark(unit)):
            return False
        return unit not in self._memory or self._memory[unit].is_free(time.monotonic())

    def _mark(self, unit: str) -> dict[str, str]:
        return {UNIT: unit, UNIT_RUN: str(self._folder.path.absolute())}

    def _report(self, now_s: float) -> None:
        report = self._guard.report(self._released())
        if report == self._told and now_s - self._told_s < REPORT_S:
            return
        self._told, self._told_s = report, now_s
        self._client.post(encode(report))
        if now_s - self._heard_s > LOOK_AGAIN_S:
            self._heard_s = now_s
            self._client.request_reconnect()

    def _released(self) -> list[str]:
        """Policies that need no engine any more."""
        lifecycle, learning = self._lifecycle, self._config.learning
        if lifecycle.phase != "running":
            return list(learning)
        return [name for name in learning if name in lifecycle.stopped or f"learner/{name}" in lifecycle.done]


class _Memory:
    """What a unit's GPUs hold, against what they held at first. A driver that said no is asked again a second later."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus
        self._first_mib = used_gpu_mib(gpus)
        self._refused_s = -MEMORY_EVERY_S

    def is_free(self, now_s: float) -> bool:
        """Whether all is given back; where the driver does not answer, that no process is left has to do."""
        if self._first_mib is None:
            return True
        if now_s - self._refused_s < MEMORY_EVERY_S:
            return False
        now_mib = used_gpu_mib(self._gpus)
        is_free = now_mib is None or all(
            held <= first + SPARE_MIB for held, first in zip(now_mib, self._first_mib, strict=True)
        )
        self._refused_s = self._refused_s if is_free else now_s
        return is_free
