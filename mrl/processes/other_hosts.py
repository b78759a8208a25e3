"""The other hosts of a run, as the first host's supervisor knows them: their reports, and the orders to them."""

from dataclasses import dataclass

from mrl.config.schema import LaunchTable
from mrl.processes.host_processes import HOST_MARGIN_S, LineSink
from mrl.processes.planning.lifecycle import Lifecycle
from mrl.processes.planning.plan import Plan
from mrl.records.host_messages import HostOrder, HostReport

SILENCE_S = 3.0
"""Seconds without a report after which the end of the run no longer waits for a host."""


@dataclass(slots=True)
class _Known:
    """State of one host."""

    session: str = ""
    heard_s: float = 0.0
    is_over: bool = True
    was_lost: bool = False
    is_spared: bool = False
    """Whether the run can go on without this host."""
    ended: frozenset[str] = frozenset()
    """Stopped policies that have no process on this host."""
    is_missed: bool = False
    """Whether the user was told that the run goes on without this host."""


class OtherHosts:
    """Takes reports of hosts, gives orders. A host has one session: a new one waits until the earlier one is over.

    A session is over when its host says so, or has been silent for so long that it has ended its processes by itself.
    """

    def __init__(
        self, plan: Plan, table: LaunchTable, lifecycle: Lifecycle, told: LineSink, *, attempt: str, now_s: float
    ) -> None:
        self._table, self._lifecycle, self._told, self._attempt = table, lifecycle, told, attempt
        self._all_hosts = [str(host) for host in plan.hosts]
        self._hosts = {name: _Known(heard_s=now_s, is_spared=plan.spares(name)) for name in plan.other_hosts}

    def answer(self, report: HostReport, now_s: float) -> HostOrder:
        """Take in a report and return the order to its session. An unknown host is ordered to stop."""
        known = self._hosts.get(report.host)
        if known is None:
            return self._order("stopping")
        if report.session != known.session:
            if not self._is_gone(known, now_s):
                return self._order("wait")
            known.session = report.session
            self._told.event(f"host {report.host} {'is back' if known.was_lost else 'has joined'}", now_s)
            known.was_lost, known.is_missed = True, False
        known.heard_s, known.is_over = now_s, report.is_over
        self._note(report, now_s)
        return self._order(self._lifecycle.phase)

    def tick(self, now_s: float) -> None:
        """Note hosts that join by themselves and were not heard of for `launch.join_s`; end the run if it needs one.

        Hosts that do not join by themselves are children of this supervisor.
        """
        if not self._table.hosts_join or self._lifecycle.phase != "running":
            return
        bound = f"launch.join_s = {self._table.join_s:g} s"
        late = {name: known for name, known in self._hosts.items() if now_s - known.heard_s > self._table.join_s}
        for name, known in late.items():
            if known.is_spared and not known.is_missed:
                known.is_missed = True
                self._told.event(f"host {name} has not reported for {bound}; the run continues without it", now_s)
        needed = [name for name, known in late.items() if not known.is_spared]
        if needed:
            self._lifecycle.end(1, f"no report for {bound} from host {', '.join(needed)}", now_s)

    def are_over(self, now_s: float) -> bool:
        """Whether no host has processes, apart from hosts that are silent for SILENCE_S."""
        return all(known.is_over or now_s - known.heard_s > SILENCE_S for known in self._hosts.values())

    def have_ended(self, policy: str) -> bool:
        """Whether no host that has joined still has processes of `policy`, which was stopped."""
        return all(known.is_over or policy in known.ended for known in self._hosts.values())

    def _note(self, report: HostReport, now_s: float) -> None:
        for learner in report.done:
            self._lifecycle.finished(learner, now_s)
        self._hosts[report.host].ended = frozenset(report.ended)
        for line in report.lines:
            self._told.line(f"[{report.host}] {line}")
        if report.end_code:
            self._lifecycle.end(report.end_code, f"{report.host}: {report.end_reason}", now_s)

    def _is_gone(self, known: _Known, now_s: float) -> bool:
        return known.is_over or now_s - known.heard_s > self._table.alone_s + self._lifecycle.stop_s + HOST_MARGIN_S

    def _order(self, phase: str) -> HostOrder:
        return HostOrder(
            phase=phase,  # type: ignore[arg-type]
            attempt=self._attempt,
            hosts=self._all_hosts,
            done=sorted(self._lifecycle.done),
            stopped=sorted(self._lifecycle.stopped),
        )
