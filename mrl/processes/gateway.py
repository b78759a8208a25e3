"""The gateway of one run: the HTTP server through which agents ask policies.

Owns: the sessions of agents, requests outside of episodes, and the processes of agents that the run starts.
Speaks: turns and rewards to the environment processes of rollout workers, requests to the workers themselves, OpenAI's
    API to agents and other clients; metrics to the supervisor.
Waits for: agents and turns; an agent that is silent for `gateway.idle_s` has given its episode up.
Unblocked by: any agent, and the policies' engines.
If it dies: groups in play are given up; the gateway is started again on the same port, and agents ask anew.
"""

import asyncio
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from aiohttp import web

from mrl.config.run_folder import RunFolder
from mrl.config.schema import GatewayTable, RunConfig
from mrl.errors import AddressError
from mrl.files import replace_file
from mrl.gateway.agent_children import AgentChildren
from mrl.gateway.agent_network import BACKLOG
from mrl.gateway.agent_programs import AgentPrograms
from mrl.gateway.agent_start import AgentStarts
from mrl.gateway.checkpoint_servers import KEPT_VERSIONS, CheckpointServers
from mrl.gateway.direct_queue import DirectRequestQueue
from mrl.gateway.routes import Gateway
from mrl.gateway.session_registry import SessionRegistry
from mrl.metrics.telemetry import Telemetry
from mrl.processes import role_runtime
from mrl.processes.planning.plan import environment, role_argv
from mrl.tasks.environments.gateway_location import AGENT_KEY, ENDPOINT, SEAT_KEY
from mrl.transport.endpoints import port_of, publish_endpoint, reachable_host, read_endpoint
from mrl.transport.server import check_address

ROLE = "gateway"
ROUND_S = 0.2
REPORT_S = 2.0
UNSERVED_S = 30.0
"""Seconds after which the log warns of episodes that no agent has taken; the warning repeats at this interval."""
MIB = 1024**2
DIRECT_COUNTS = ("requests", "answers", "tokens", "scored_tokens", "tried_again")

log = structlog.get_logger()


def main(run_folder: Path, policy: str, index: int) -> int:
    """Serve until told to stop."""
    return role_runtime.run_role(run_folder, ROLE, "", _serve)


def _serve(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
    stop = role_runtime.stop_event()
    telemetry = role_runtime.connect_telemetry(folder, ROLE, "", closing)
    keys = {name: kept_key(folder.keys / name) for name in (AGENT_KEY, SEAT_KEY)}
    asyncio.run(_run(config, folder, telemetry, stop, keys))
    return 0


def kept_key(path: Path) -> str:
    """Return the key in this file, or make one where there is no file. A key lasts as long as the run's folder."""
    if not path.exists():
        replace_file(path, f"mrl-{secrets.token_hex(24)}\n".encode(), mode=0o600)
    return path.read_text(encoding="ascii").strip()


async def _run(
    config: RunConfig, folder: RunFolder, telemetry: Telemetry, stop: threading.Event, keys: dict[str, str]
) -> None:
    registry = SessionRegistry(idle_s=config.gateway.idle_s)
    shutil.rmtree(folder.path / KEPT_VERSIONS, ignore_errors=True)  # files of an earlier gateway
    kept = CheckpointServers(
        folder.path,
        folder.checkpoint_steps,
        most=config.gateway.kept_versions,
        start=partial(kept_version, config, folder.path),
    )
    desk = DirectRequestQueue(config.learning, kept) if config.gateway.serve else None
    gateway = Gateway(
        registry,
        desk=desk,
        policies=config.learning,
        tasks=[name for name, table in config.tasks.items() if table.source == "agent"],
        key=keys[AGENT_KEY],
        seat_key=keys[SEAT_KEY],
        max_body_bytes=config.gateway.max_body_mib * MIB,
    )
    runner = gateway.runner()
    await runner.setup()
    children: AgentChildren | None = None
    programs: AgentPrograms | None = None
    try:
        address = await listen(runner, config.gateway, folder.endpoints)
        url = address.replace("tcp://", "http://") + "/v1"
        log.info("gateway listening", url=url, key=str(folder.keys / AGENT_KEY))
        starts = AgentStarts(runner, url)
        children = AgentChildren(config.tasks, starts, registry, key=keys[AGENT_KEY])
        programs = AgentPrograms(config.tasks, starts, registry, key_of=gateway.key_of)
        telemetry.doing("serving agents")
        watched = _Watched(registry, desk, children, programs, partial(gateway.send_strangers_away, runner))
        await _watch(watched, telemetry, stop)
    finally:
        if children is not None:
            children.close()
        if programs is not None:
            await programs.close()
        kept.close()
        await runner.cleanup()


def kept_version(config: RunConfig, run_folder: Path, policy: str, step: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return command and environment of the process that serves a policy's checkpoint; GPUs stay with the run."""
    argv = role_argv("kept-version", run_folder, policy=policy, index=step)
    return argv, environment(config.policies[policy].rollout.threads) | {"CUDA_VISIBLE_DEVICES": ""}


async def listen(runner: web.AppRunner, table: GatewayTable, endpoints: Path) -> str:
    """Listen, publish the address and return it. With `gateway.port` = 0, prefer the port of the last gateway.

    Raises AddressError when the configured port cannot be had.
    """
    check_address(table.host, table.port)
    wanted = [table.port] if table.port else [port_of(read_endpoint(endpoints, ENDPOINT)), 0]
    for place, port in enumerate(wanted):
        site = web.TCPSite(runner, "0.0.0.0" if table.host == "*" else table.host, port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            if place + 1 == len(wanted):
                raise AddressError(
                    str(error), where=f"gateway.port = {port}", cure="choose another port, or 0 for any free one"
                ) from None
            continue
        break
    found = runner.addresses[0][1]
    address = f"tcp://{reachable_host(table.host)}:{found}"
    publish_endpoint(endpoints, ENDPOINT, address)
    return address


@dataclass(frozen=True)
class _Watched:
    registry: SessionRegistry
    desk: DirectRequestQueue | None
    children: AgentChildren
    programs: AgentPrograms
    send_strangers_away: Callable[[], None]

    async def tend(self) -> None:
        await self.children.tend()
        self.programs.tend()
        self.send_strangers_away()
        if self.desk is not None:
            self.desk.tend()

    def metrics(self) -> dict[str, float]:
        num_processes = self.children.num_alive + self.programs.num_alive
        return metrics_of(self.registry, num_processes) | (direct_metrics(self.desk) if self.desk is not None else {})


async def _watch(watched: _Watched, telemetry: Telemetry, stop: threading.Event) -> None:
    registry = watched.registry
    next_report_s = told_s = time.monotonic()
    while not stop.is_set():
        await watched.tend()
        for session in registry.expire():
            log.warning("agent went silent, episode abandoned", task=session.task, policy=session.policy)
        now_s = time.monotonic()
        if now_s >= next_report_s:
            next_report_s = now_s + REPORT_S
            telemetry.metrics(0, watched.metrics())
        if now_s - told_s > UNSERVED_S:
            told_s = now_s
            for task, since_s in registry.unserved_s().items():
                if since_s > UNSERVED_S:
                    log.warning("episodes are waiting, but no agent takes them", task=task, since_s=round(since_s))
        await asyncio.sleep(ROUND_S)


def metrics_of(registry: SessionRegistry, num_processes: int) -> dict[str, float]:
    """Return the gateway's counts as metrics: totals since its start, and current numbers."""
    counts = {f"gateway/{name}": float(count) for name, count in sorted(registry.counts.items())}
    return counts | {
        "gateway/playing": float(len(registry)),
        "gateway/offered_now": float(registry.num_offered),
        "gateway/agents_waiting": float(registry.num_waiting),
        "gateway/agent_processes": float(num_processes),
    }


def direct_metrics(desk: DirectRequestQueue) -> dict[str, float]:
    """Return metrics of requests outside of episodes: totals since the gateway's start, and current numbers."""
    counts = {f"gateway/plain/{name}": float(desk.counts[name]) for name in DIRECT_COUNTS}
    now = {"waiting": desk.num_waiting, "kept_versions": desk.kept.num_alive}
    return counts | {f"gateway/plain/{name}": float(count) for name, count in now.items()}
