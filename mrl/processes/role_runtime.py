"""The outer edge that all roles (learner, worker, exchange, ...) share: signals, logs, telemetry, links, exit codes.

Exit codes: 0 done or told to stop, 1 cannot continue, 2 a mistake that the user can cure. The reason of an ending with
1 or 2 is the last line on stderr and lies in `crash/<role>.json`.
"""

import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import setproctitle
import structlog

from mrl.config.run_folder import RunFolder, read_run_config, write_json
from mrl.config.schema import RunConfig
from mrl.errors import MRLError, UserError
from mrl.exchange.client import ExchangeClient
from mrl.exchange.daemon import ENDPOINT
from mrl.files import DISK_FULL
from mrl.metrics.logging import configure_logging
from mrl.metrics.telemetry import Telemetry
from mrl.metrics.unconfirmed_metrics import SUFFIX, UnconfirmedMetrics
from mrl.plugins import MODULES
from mrl.processes.planning.time_sharing import turn_devices
from mrl.processes.preparation.hub_models import located
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.endpoints import nearest_endpoint
from mrl.transport.grants import grant_of
from mrl.transport.keys import load_client_keys

TELEMETRY = "MRL_TELEMETRY"
"""Environment variable: name of the endpoint of this host's supervisor; unset on the first host."""
BEAT_S = 1.0
MAX_STACK_BYTES = 1024 * 1024
"""Size of a role's file of stacks from earlier lives beyond which the next life overwrites the file."""
FLUSH_S = 0.5
QUEUED_MESSAGES = 4
"""Messages of the greatest length that a link queues for a slow server."""

log = structlog.get_logger()


def load(run_folder: Path) -> tuple[RunConfig, RunFolder]:
    """Return the run's resolved configuration, with the paths of models on this host, and the layout of its folder."""
    return located(read_run_config(run_folder)), RunFolder(run_folder)


def stop_event() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set. Call this from the main thread.

    A thread sets the event, not the signal handler: the handler runs within the main thread, which may hold the event's
    lock, and would deadlock. `SimpleQueue.put` is safe in handlers.
    """
    event, signals = threading.Event(), queue.SimpleQueue[int]()

    def set_when_told() -> None:
        signals.get()
        event.set()

    threading.Thread(target=set_when_told, name="stop", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: signals.put(got))
    return event


Body = Callable[[RunConfig, RunFolder, ExitStack], int]
"""A role's own work: (configuration, run folder, stack of resources closed at the end) -> exit code."""


def run_role(run_folder: Path, role: str, policy: str, body: Body) -> int:
    """Run a role's body; turn every ending into an exit code, and every failure into one line that says why."""
    faulthandler.enable()
    setproctitle.setproctitle(f"mrl::{role}")
    configure_logging(role, policy)
    try:
        with ExitStack() as closing:
            config, folder = load(run_folder)
            _write_stacks_when_asked(folder, role, closing)
            return body(config, folder, closing)
    except UserError as error:
        return _end(run_folder, role, error, 1 if _may_have_room_again(error) else 2)
    except OSError as error:
        return _end(run_folder, role, error, 2 if error.errno in DISK_FULL else 1)
    except MRLError as error:
        return _end(run_folder, role, error, 1)
    except Exception as error:  # noqa: BLE001 - the outer edge: whatever it was, the supervisor gets a reason
        traceback.print_exc()
        return _end(run_folder, role, error, 1, unforeseen=True)


def _may_have_room_again(error: UserError) -> bool:
    """Whether memory ran out on a device shared in turns: the memory of a dead process comes back with a delay."""
    if not turn_devices(os.environ) or error.__cause__ is None:
        return False
    from mrl.models.device_memory import lacks_memory  # imports torch, which a role with turns has imported already

    return lacks_memory(error.__cause__)


def _write_stacks_when_asked(folder: RunFolder, role: str, closing: ExitStack) -> None:
    """Let SIGUSR1 write the stacks of all threads to a file, even when the process hangs. Raises OSError."""
    path = folder.stacks / f"{role.replace('/', '-')}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    is_long = path.exists() and path.stat().st_size > MAX_STACK_BYTES
    file = closing.enter_context(path.open("wb" if is_long else "ab"))
    faulthandler.register(signal.SIGUSR1, file=file)

    def forget() -> None:
        faulthandler.unregister(signal.SIGUSR1)
        if not path.stat().st_size:
            path.unlink()

    closing.callback(forget)


def link(
    folder: RunFolder,
    server: str,
    *,
    identity: str,
    on_message: Callable[[bytes], None],
    on_tick: Callable[[float], None] | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    closing: ExitStack,
) -> BackgroundClient:
    """Return a background link to the role with the endpoint `server`; flushed and closed with `closing`."""
    keys = load_client_keys(folder.keys, grant_of(identity))
    socket = ClientSocket(
        keys,
        lambda: nearest_endpoint(folder.endpoints, server),
        identity=identity,
        max_message_bytes=max_message_bytes,
    )
    client = BackgroundClient(
        socket,
        on_message=on_message,
        on_tick=on_tick,
        max_queued_bytes=QUEUED_MESSAGES * max_message_bytes,
        name=f"to-{server}",
    )
    closing.callback(client.close, FLUSH_S)
    return client


def connect_exchange(folder: RunFolder, role: str, policy: str, closing: ExitStack) -> ExchangeClient:
    """Return a learner's or worker's client of the exchange; never waits for the daemon."""
    client = ExchangeClient.connect(
        lambda on_message, on_tick: link(
            folder, ENDPOINT, identity=role, on_message=on_message, on_tick=on_tick, closing=closing
        ),
        client=role,
        policy=policy,
    )
    closing.callback(client.close, FLUSH_S)
    return client


def connect_telemetry(folder: RunFolder, role: str, policy: str, closing: ExitStack) -> Telemetry:
    """Return a role's telemetry to the supervisor: metrics at once, heartbeat and spans every second from a thread."""
    posts: list[Callable[[bytes], bool]] = []
    unheard = UnconfirmedMetrics(lambda body: posts[0](body) if posts else False)
    telemetry = Telemetry(role, policy, unheard.say)
    next_beat_s = [0.0]

    def beat(now_s: float) -> None:
        if now_s >= next_beat_s[0] and posts:
            next_beat_s[0] = now_s + BEAT_S
            unheard.say(telemetry.beat())
            telemetry.tell_spans()

    server = os.environ.get(TELEMETRY, "telemetry")
    client = link(folder, server, identity=role, on_message=unheard.came_back, on_tick=beat, closing=closing)
    posts.append(client.post)
    left = folder.unheard / f"{role.replace('/', '-')}-{os.getpid()}-{time.time_ns()}{SUFFIX}"
    closing.callback(lambda: unheard.settle(telemetry.beat(), left, FLUSH_S))
    closing.callback(telemetry.tell_spans, is_last=True)
    return telemetry


def _place(error: BaseException) -> str:
    """Return the innermost frame of a traceback that is in the user's own modules, or else the innermost of all."""
    frames, modules = traceback.extract_tb(error.__traceback__), os.environ.get(MODULES)
    own = [frame for frame in frames if modules and Path(frame.filename).is_relative_to(modules)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _end(run_folder: Path, role: str, error: BaseException, code: int, *, unforeseen: bool = False) -> int:
    reason = " ".join(str(error).split()) or type(error).__name__
    if unforeseen:
        reason = f"{type(error).__name__}: {reason} ({_place(error)})"
    log.error("process failed", reason=reason, exit_code=code)
    sys.stderr.write(f"{role}: {reason}\n")
    sys.stderr.flush()
    crash = RunFolder(run_folder).crash
    if crash.is_dir():
        details = {"role": role, "exit_code": code, "kind": type(error).__name__, "reason": reason}
        details["traceback"] = "".join(traceback.format_exception(error))
        with suppress(OSError):  # the disk may be full; the reason stands on stderr
            write_json(crash / f"{role.replace('/', '-')}.json", msgspec.to_builtins(details))
    return code
