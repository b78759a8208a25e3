"""The allocator: decides how many requests each policy may run at once.

Owns: the rollout slots, their leases and shares.
Speaks: lease grants to workers, acknowledgements to learners, decisions as metrics.
Waits for: requests, for a fraction of a second at a time.
Unblocked by: a message, or the next period.
If it dies: holders keep their last lease; the restarted allocator listens for one ttl, confirming leases, then decides.
"""

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import structlog

from mrl.allocation.decision import DecisionRecord
from mrl.allocation.objective import SLOTS
from mrl.allocation.slot_core import SlotCore, SlotSettings, SlotShare
from mrl.config.run_folder import RunFolder, socket_file
from mrl.config.schema import RunConfig
from mrl.errors import AddressError, RecordError
from mrl.metrics.telemetry import Telemetry
from mrl.processes import role_runtime
from mrl.processes.lease_rights import may_send
from mrl.processes.unit_allocator import serve_units
from mrl.records.codec import decode, encode
from mrl.records.leases import allocator_request_decoder
from mrl.transport.endpoints import is_published, port_of, publish_endpoint, read_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import load_keys
from mrl.transport.server import ServerSocket

ROLE = "allocator"
POLL_S = 0.1

log = structlog.get_logger()


def main(run_folder: Path, policy: str, index: int) -> int:
    """Share the slots until told to stop."""
    return role_runtime.run_role(run_folder, ROLE, "", _serve)


def _serve(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
    stop = role_runtime.stop_event()
    telemetry = role_runtime.connect_telemetry(folder, ROLE, "", closing)
    table = config.allocation
    if table.units:
        server = _listen(folder, config.exchange.host)
        closing.callback(server.close)
        serve_units(config, folder, server, telemetry, stop)
        return 0
    settings = slot_settings(config)
    core = SlotCore(config.learning, settings, time.monotonic(), settling=is_published(folder.endpoints, ROLE))
    server = _listen(folder, config.exchange.host)
    telemetry.doing("sharing slots")
    period_s = min(table.period_s, table.ttl_s / 4)
    decide_s = 0.0
    try:
        while not stop.is_set():
            _answer(server, core)
            if time.monotonic() >= decide_s:
                decide_s = time.monotonic() + period_s
                decisions = core.tick(time.monotonic())
                report(telemetry, decisions, core.record, core.bound)
    finally:
        server.close()
    return 0


def slot_settings(config: RunConfig) -> SlotSettings:
    """Return the slot allocator's settings from the configuration."""
    table = config.allocation
    return SlotSettings(
        table.slots,
        table.floor_slots,
        table.ttl_s,
        silent_s=table.hung_s,
        rule=msgspec.structs.replace(SLOTS, period_s=table.period_s, objective=table.objective),
        group_sizes={policy: config.policies[policy].rollout.group_size for policy in config.learning},
        weights=table.weights,
    )


def _listen(folder: RunFolder, host: str) -> ServerSocket:
    """Listen on the port of the previous allocator, if it is free, so that clients need not look for a new one."""
    bind = partial(ServerSocket, load_keys(folder.keys), admits=_admits, host=host, ipc_path=socket_file(ROLE))
    try:
        server = bind(port=port_of(read_endpoint(folder.endpoints, ROLE)))
    except AddressError:
        server = bind()
    publish_endpoint(folder.endpoints, ROLE, server.address, server.ipc_path)
    return server


def _admits(grant: Grant) -> bool:
    return grant.role in ("learner", "worker", "supervisor")


def _answer(server: ServerSocket, core: SlotCore) -> None:
    for client, body, grant in server.receive(POLL_S):
        try:
            message = decode(body, allocator_request_decoder)
        except RecordError as error:
            log.warning("message refused", client=client.decode(errors="replace"), reason=str(error))
            continue
        if not may_send(grant, message):
            server.refusals.note("impersonation", grant.name, claims=message.policy)
            continue
        for _, reply in core.handle(message, time.monotonic()):
            server.send(client, encode(reply))


def report(telemetry: Telemetry, decisions: list[SlotShare], record: DecisionRecord, bound: float) -> None:
    """Send every policy's share as metrics; their step is the number of reports from the policy's learner."""
    for decision in decisions:
        if decision.moved_slots:
            log.info(
                "slots moved",
                policy=decision.policy,
                slots=decision.slots,
                epoch=decision.epoch,
                gain=record.gain,
                why=record.why,
                demand_slots=round(decision.demand_slots, 1),
            )
        telemetry.metrics(
            decision.num_reports,
            {
                "allocation/slots": decision.slots,
                "allocation/held_slots": decision.held_slots,
                "allocation/demand_slots": decision.demand_slots,
                "allocation/progress": decision.progress,
                "allocation/supply_progress": decision.supply_progress,
                "allocation/bound": bound,
                "allocation/gain": 1.0 if record.gain is None else record.gain,
                "allocation/trained_share": decision.trained_share,
                "allocation/epoch": decision.epoch,
                "allocation/moves": decision.moved_slots,
            }
            | _because(decision, record),
            policy=decision.policy,
        )


def _because(decision: SlotShare, record: DecisionRecord) -> dict[str, float]:
    if not decision.moved_slots:
        return {}
    return {f"allocation/moves_because/{record.why.replace(' ', '_')}": decision.moved_slots}
