"""The loop of the allocator that leases whole units; `units.jsonl` gets every transition of every unit."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import structlog

from mrl.allocation.decision import DecisionRecord
from mrl.allocation.objective import Rule
from mrl.allocation.unit_controller import UnitController
from mrl.allocation.unit_core import UnitCore, UnitSettings, UnitShare
from mrl.allocation.unit_leases import LeaseCounts, Transition
from mrl.config.rules.unit_rules import KINDS, fitting_units, may_sleep
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.config.unit_names import Unit, parse_units
from mrl.config.unit_types import named_types
from mrl.errors import DeviceError, RecordError
from mrl.metrics.names import idle_metric, type_metric
from mrl.metrics.telemetry import Telemetry
from mrl.processes.allocator_state import AllocatorState, new_allocator_state
from mrl.processes.lease_rights import may_send
from mrl.records.codec import decode, encode
from mrl.records.leases import unit_request_decoder
from mrl.records.unit_messages import NodeReport
from mrl.transport.keys import load_keys
from mrl.transport.server import ServerSocket

POLL_S = 0.05
UNITS_PER_RECORD = 500
UNSERVED_S = 600.0
"""Seconds without any unit that could serve a policy after which the run ends; a reboot of a host takes less."""

log = structlog.get_logger()


def life_of(folder: RunFolder) -> AllocatorState:
    """Return a new allocator of a run. Raises RunFolderError when its number cannot be kept."""
    return new_allocator_state(folder.path / "allocator.json", load_keys(folder.keys).server_public.decode())


def unit_rule(config: RunConfig, units: Sequence[Unit], switch_s: Mapping[str, float], now_s: float) -> UnitController:
    """Return the controller of a run's units. `switch_s`: policy -> seconds of a switch to it, as measured earlier."""
    table = config.allocation
    return UnitController(
        {name: KINDS[config.policies[name].device] for name in config.learning},
        Counter(unit.kind for unit in units),
        Rule(period_s=table.period_s, objective=table.objective),
        floor_units=table.floor_units,
        switching_share=table.switching_share,
        slots_per_unit=table.slots // len(units),
        hung_s=table.hung_s,
        weights=table.weights,
        now_s=now_s,
        switch_s=switch_s,
    )


def unit_core(config: RunConfig, life: AllocatorState, now_s: float) -> UnitCore:
    """Return the allocator's core for the units and policies of a run.

    A host that joins by itself may bring the only units that can serve a policy. Such a policy waits as long as a host
    may take to join.
    """
    table = config.allocation
    units = parse_units(table.units)
    fits = {name: fitting_units(config, name) for name in config.learning}
    settings = UnitSettings(
        ttl_s=table.ttl_s,
        start_s=_start_s(config),
        grace_s=table.grace_s,
        slots_per_unit=table.slots // len(units),
        sleeping_policies=frozenset(name for name in config.learning if may_sleep(config, name)),
        unserved_s=max(UNSERVED_S, config.launch.join_s if config.launch.hosts_join else 0.0),
    )
    types = named_types(table.unit_types, units)
    rule = unit_rule(config, units, life.switch_s, now_s)
    return UnitCore(fits, rule, settings, now_s, life=life.number, types=types)


def _start_s(config: RunConfig) -> float:
    """Return seconds from a grant to its worker's first request: the start of a process, and of the slowest server."""
    servers = [policy.rollout.server for policy in config.policies.values() if policy.rollout.engine != "embedded"]
    return config.supervision.start_s + max((server.start_s for server in servers), default=0.0)


def serve_units(
    config: RunConfig, folder: RunFolder, server: ServerSocket, telemetry: Telemetry, stop: threading.Event
) -> None:
    """Lease units until told to stop. Raises DeviceError when no unit is left for a policy."""
    life = life_of(folder)
    core = unit_core(config, life, time.monotonic())
    telemetry.doing("leasing units")
    period_s = min(config.allocation.period_s, config.allocation.ttl_s / 4)
    decide_s, told, counts = 0.0, "", LeaseCounts()
    with folder.units_jsonl.open("ab", buffering=0) as journal:
        while not stop.is_set():
            _answer(server, core)
            if time.monotonic() >= decide_s:
                decide_s = time.monotonic() + period_s
                shares = core.tick(time.monotonic())
                life.keep(core.rule.switch_s)
                _check_served(core, time.monotonic())
                num_reports = sum(share.num_reports for share in shares)
                _tell(telemetry, shares, counts)
                _tell_idle(telemetry, num_reports, core.idle.shares(time.monotonic()))
                if config.allocation.residency == "sleep":
                    telemetry.metrics(num_reports, sleep_counts(core.newest.values()))
                told = _log_verdicts(core.rule.records(), told)
            transitions = core.take_log()
            counts.add(transitions)
            for line in _lines(transitions, core.types):
                journal.write(line)


def _check_served(core: UnitCore, now_s: float) -> None:
    """Raises DeviceError for a policy that no unit serves any more: the policy would wait for ever."""
    unserved = core.unserved(now_s)
    if unserved:
        raise DeviceError(
            f"no unit can serve {' and '.join(unserved)} any more: engines fail on all units, or their hosts are lost",
            cure="see crash/ for the reasons; repair the hosts or use other units, and continue with --resume",
        )


def _answer(server: ServerSocket, core: UnitCore) -> None:
    for client, body, grant in server.receive(POLL_S):
        try:
            message = decode(body, unit_request_decoder)
        except RecordError as error:
            log.warning("message refused", client=client.decode(errors="replace"), reason=str(error))
            continue
        if not may_send(grant, message):
            server.refusals.note("impersonation", grant.name, claims=type(message).__name__)
            continue
        for reply in core.handle(message, time.monotonic()):
            server.send(client, encode(reply))


def _lines(transitions: Iterable[Transition], types: Mapping[str, str]) -> Iterable[bytes]:
    zero_unix_s = time.time() - time.monotonic()
    for one in transitions:
        log.info("unit", unit=one.unit, state=one.state.value, policy=one.policy, epoch=one.epoch, why=one.why)
        fields = one._asdict() | {"type": types[one.unit], "time_unix_s": round(zero_unix_s + one.at_s, 3)}
        del fields["at_s"]
        yield msgspec.json.encode(fields) + b"\n"


def _log_verdicts(records: Sequence[DecisionRecord], told: str) -> str:
    """Log the newest verdicts where they differ from `told`, the verdicts logged last; return them."""
    verdicts = "; ".join(f"{record.verdict} {record.candidate}" for record in records)
    if verdicts != told:
        for record in records:
            demands = {one.policy: round(one.demand_units, 2) for one in record.readings}
            log.info("decision", verdict=record.verdict, gain=record.gain, candidate=record.candidate, demands=demands)
    return verdicts


def sleep_counts(reports: Iterable[NodeReport]) -> dict[str, float]:
    """Return as metrics the numbers of engines, over all hosts, that slept, woke up, and failed to do either."""
    counts = Counter[str]()
    for report in reports:
        counts += Counter(slept=report.slept, woken=report.woken)
        counts += Counter(failed_sleeps=report.failed_sleeps, failed_wakes=report.failed_wakes)
    return {f"allocation/{name}": counts[name] for name in ("slept", "woken", "failed_sleeps", "failed_wakes")}


def _tell(telemetry: Telemetry, shares: Sequence[UnitShare], counts: LeaseCounts) -> None:
    for share in shares:
        values = {
            "allocation/target_units": share.target_units,
            "allocation/held_units": share.held_units,
            "allocation/demand_units": share.demand_units,
            "allocation/progress": share.progress,
            "allocation/begun_leases": counts.begun[share.policy],
        }
        values |= {
            f"allocation/ended_leases/{why.replace(' ', '_')}": number
            for (policy, why), number in counts.ended.items()
            if policy == share.policy
        }
        for unit_type, own in share.by_type.items():
            values |= {
                type_metric("target_units", unit_type): own.target_units,
                type_metric("held_units", unit_type): own.held_units,
                type_metric("unit_tokens_per_s", unit_type): own.tokens_per_s,
            }
        telemetry.metrics(share.num_reports, values, policy=share.policy)


def _tell_idle(telemetry: Telemetry, num_reports: int, idle_shares: Mapping[str, float]) -> None:
    units = list(idle_shares)
    for start in range(0, len(units), UNITS_PER_RECORD):
        part = units[start : start + UNITS_PER_RECORD]
        telemetry.metrics(num_reports, {idle_metric(unit): idle_shares[unit] for unit in part})
