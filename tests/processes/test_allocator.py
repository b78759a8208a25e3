"""The allocator as a process: leases over real sockets, a restart, its metrics."""

import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mrl.allocation.lease import LeaseHolder, Used
from mrl.allocation.slot_core import SlotCore, SlotSettings, SlotShare
from mrl.metrics.telemetry import Telemetry
from mrl.processes.allocator import report
from mrl.records.codec import decode
from mrl.records.host_messages import inbox_decoder
from mrl.records.telemetry_messages import MetricsRecord, TelemetryRecord
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.endpoints import nearest_endpoint, publish_endpoint
from mrl.transport.grants import Grant, grant_of
from mrl.transport.keys import RunKeys, create_keys, load_client_keys
from mrl.transport.server import ServerSocket

ROLE = "import sys, pathlib; from mrl.processes.allocator import main; sys.exit(main(pathlib.Path(sys.argv[1]), '', 0))"
BOUND_S = 120.0

Start = Callable[[], subprocess.Popen[bytes]]


def test_every_decision_becomes_metrics_of_its_policy() -> None:
    """All names are in the table, which Telemetry asserts, and the policy is that of the decision."""
    records: list[TelemetryRecord] = []
    telemetry = Telemetry("allocator", "", records.append)
    core = SlotCore(["qwen"], SlotSettings(64, 8, 10.0), 0.0)
    report(telemetry, [SlotShare("qwen", 64, 60, 70.0, 0.9, 7, 2, 12)], core.record, core.bound)

    (record,) = records
    assert isinstance(record, MetricsRecord)
    assert (record.policy, record.step) == ("qwen", 12)
    assert record.values["allocation/slots"] == 64
    assert record.values["allocation/moves"] == 2
    assert record.values["allocation/moves_because/who_takes_part_has_changed"] == 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the least that the role reads: two policies, 100 slots, a ttl of four seconds."""
    config = {
        "run": {"name": "r", "steps": 1},
        "tasks": {"reverse": {"source": "words", "dataset": "reverse"}},
        "policies": {
            name: {"model": "/nowhere", "rollout": {"group_size": 2}, "learner": {"prompts_per_step": 4}}
            for name in ("qwen", "llama")
        },
        "allocation": {"slots": 100, "floor_slots": 10, "ttl_s": 4.0, "period_s": 0.2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def keys(run: Path) -> RunKeys:
    """The keys of that run."""
    return create_keys(run / "keys", [Grant("worker", "qwen"), Grant("worker", "llama")])


@pytest.fixture
def start(run: Path, keys: RunKeys, temporary: dict[str, str]) -> Iterator[Start]:
    """Starts the role in a process of its own."""
    processes: list[subprocess.Popen[bytes]] = []

    def start_role() -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen([sys.executable, "-c", ROLE, str(run)], env=temporary))
        return processes[-1]

    yield start_role
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def connect(run: Path, keys: RunKeys) -> Iterator[Callable[[str], LeaseHolder]]:
    """Makes a lease holder with a link of its own."""
    clients: list[BackgroundClient] = []

    def connect_holder(name: str, policy: str = "") -> LeaseHolder:
        holder = LeaseHolder(name, policy or name.split("/")[1])
        own = load_client_keys(keys.folder, grant_of(name))
        socket = ClientSocket(own, lambda: nearest_endpoint(run / "endpoints", "allocator"), identity=name)
        client = BackgroundClient(
            socket,
            on_message=lambda body: holder.on_message(body, time.monotonic()),
            on_tick=lambda now_s: holder.on_tick(now_s, Used()),
        )
        holder.open(client.post, client.restart)
        clients.append(client)
        return holder

    yield connect_holder
    for client in clients:
        client.close(0.1)


def await_slots(holder: LeaseHolder, wanted: int) -> None:
    """Look every few milliseconds, as a worker without work does, until the lease is what is wanted."""
    end_s = time.monotonic() + BOUND_S
    while (slots := holder.slots(time.monotonic())) != wanted:
        assert time.monotonic() < end_s, f"{slots} slots after {BOUND_S} s, wanted {wanted}"
        time.sleep(0.01)


@pytest.mark.system
def test_two_workers_share_the_slots_through_a_restart(
    start: Start, connect: Callable[[str], LeaseHolder], run: Path
) -> None:
    """Half each; a killed allocator changes nothing; after its restart the slots of a lost worker go to the other."""
    first = start()
    qwen, llama = connect("worker/qwen/0"), connect("worker/llama/0")
    await_slots(qwen, 50)
    await_slots(llama, 50)
    first.kill()
    first.wait()
    assert (qwen.slots(time.monotonic()), llama.slots(time.monotonic())) == (50, 50)

    llama.open(lambda _: False, lambda: None)  # never heard of again
    again = start()
    await_slots(qwen, 100)
    again.send_signal(signal.SIGTERM)
    assert again.wait(timeout=120) == 0


@pytest.mark.system
def test_nobody_takes_the_slots_of_another_policy(start: Start, connect: Callable[..., LeaseHolder]) -> None:
    """A worker of llama that asks in the name of qwen gets nothing, and qwen keeps what it has."""
    start()
    honest = connect("worker/qwen/0")
    await_slots(honest, 100)
    thief = connect("worker/llama/0", "qwen")
    second = connect("worker/llama/1")
    end_s = time.monotonic() + BOUND_S
    while (honest.slots(time.monotonic()), second.slots(time.monotonic())) != (50, 50):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert thief.slots(time.monotonic()) == 0


@pytest.mark.system
def test_decisions_reach_the_supervisor(start: Start, run: Path, keys: RunKeys) -> None:
    """Each policy's share arrives over the telemetry link without anybody asking."""
    server = ServerSocket(keys)
    publish_endpoint(run / "endpoints", "telemetry", server.address, server.ipc_path)
    start()

    shares: dict[str, float] = {}
    end_s = time.monotonic() + BOUND_S
    while len(shares) < 2 and time.monotonic() < end_s:
        for message in server.receive(0.1):
            record = decode(message.body, inbox_decoder)
            if isinstance(record, MetricsRecord):
                shares[record.policy] = record.values["allocation/slots"]
    server.close()

    assert shares == {"qwen": 50, "llama": 50}


@pytest.mark.system
def test_too_few_slots_are_the_users_mistake(start: Start, run: Path) -> None:
    """Exit code 2, which nobody restarts."""
    config = json.loads((run / "config.json").read_text())
    config["allocation"]["slots"] = 1
    (run / "config.json").write_text(json.dumps(config))

    assert start().wait(timeout=BOUND_S) == 2


def compute(seconds: float) -> None:
    """As a forward does: torch lets other threads run meanwhile."""
    left_MM, right_MM = torch.ones(1500, 1500), torch.ones(1500, 1500)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        left_MM @ right_MM


def hold_interpreter(seconds: int) -> None:
    """One call after which any other thread runs for the first time."""
    ctypes.PyDLL(None).sleep(seconds)  # a function of C, called as one of Python's own: nothing lets go


@pytest.mark.system
def test_a_lease_is_renewed_beside_a_long_forward_and_lost_by_what_lets_no_thread_run(
    start: Start, connect: Callable[[str], LeaseHolder]
) -> None:
    """Longer than the ttl. Without the interpreter nobody renews it, and others get the slots."""
    start()
    qwen, llama = connect("worker/qwen/0"), connect("worker/llama/0")
    await_slots(qwen, 50)
    await_slots(llama, 50)

    compute(6.0)
    assert (qwen.times_lost, qwen.slots(time.monotonic())) == (0, 50)
    hold_interpreter(6)
    assert qwen.is_lost(time.monotonic())
    await_slots(qwen, 100)  # of `llama`, which lives here too and is not looked at, nothing is heard any more
