"""Links between roles, as the run folder describes them."""

import importlib
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mrl.config.run_folder import RunFolder
from mrl.errors import DeviceError, RunFolderError
from mrl.metrics.jsonl import each_metrics
from mrl.models.device_memory import enough_memory
from mrl.plugins import MODULES
from mrl.processes import role_runtime, worker
from mrl.processes.planning.time_sharing import TURN_DEVICES
from mrl.processes.supervisor import RunFiles
from mrl.records.codec import decode
from mrl.records.host_messages import inbox_decoder
from mrl.records.rollouts import MAX_GROUP_BYTES
from mrl.records.telemetry_messages import (
    HeartbeatRecord,
    MetricsRecord,
    SpansRecord,
    TelemetryRecord,
)
from mrl.transport.endpoints import publish_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys, revoke_client_key
from mrl.transport.server import Incoming, ServerSocket

QWEN = Grant("worker", "qwen")


@pytest.mark.parametrize("is_near", [True, False], ids=["socket file", "tcp"])
def test_a_role_links_to_a_server_with_its_own_key(is_near: bool) -> None:
    """Over the socket file where one is published, otherwise over tcp; the answer comes back the same way."""
    with tempfile.TemporaryDirectory(prefix="mrl-") as place, ExitStack() as closing:
        folder = RunFolder(Path(place))
        keys = create_keys(folder.keys, [QWEN])
        server = ServerSocket(keys, host="" if is_near else "127.0.0.1")
        closing.callback(server.close)
        publish_endpoint(folder.endpoints, "learner-qwen", server.address, server.ipc_path if is_near else None)
        answers: queue.Queue[bytes] = queue.Queue()
        client = role_runtime.link(
            folder, "learner-qwen", identity="worker/qwen/0", on_message=answers.put, closing=closing
        )
        assert client.post(b"hello")
        assert receive_one(server) == Incoming(b"worker/qwen/0", b"hello", QWEN)
        assert server.send(b"worker/qwen/0", b"welcome")
        assert answers.get(timeout=60) == b"welcome"
        address = client._client._socket.last_endpoint
        assert address.startswith(b"ipc://" if is_near else b"tcp://")


def test_a_link_may_carry_longer_messages_than_others() -> None:
    """Several of them; one that is longer still is refused at once."""
    limit = 40 << 20
    with tempfile.TemporaryDirectory(prefix="mrl-") as place, ExitStack() as closing:
        folder = RunFolder(Path(place))
        server = ServerSocket(create_keys(folder.keys, [QWEN]), max_message_bytes=limit)
        closing.callback(server.close)
        publish_endpoint(folder.endpoints, "learner-qwen", server.address, server.ipc_path)
        named = {"identity": "worker/qwen/0", "on_message": lambda _: None, "closing": closing}
        client = role_runtime.link(folder, "learner-qwen", **named, max_message_bytes=limit)
        assert not client.post(bytes(limit + 1))
        assert client.post(bytes(limit))
        assert len(receive_one(server).body) == limit
        other = role_runtime.link(folder, "learner-qwen", **named)
        assert not other.post(bytes(limit))


def test_a_workers_link_to_its_learner_carries_groups_of_long_answers() -> None:
    """Longer than any other message of a run."""
    with tempfile.TemporaryDirectory(prefix="mrl-") as place, ExitStack() as closing:
        folder = RunFolder(Path(place))
        server = ServerSocket(create_keys(folder.keys, [QWEN]), max_message_bytes=MAX_GROUP_BYTES)
        closing.callback(server.close)
        publish_endpoint(folder.endpoints, "learner-qwen", server.address, server.ipc_path)
        link = worker._connect_learner(folder, "qwen", "worker/qwen/0", closing)
        assert link._requests._post(bytes(20 << 20))
        assert len(receive_one(server).body) == 20 << 20


def test_a_signal_that_comes_while_the_event_is_looked_at_sets_it() -> None:
    """The main thread may hold the event's lock when it is interrupted."""
    code = (
        "import signal; from mrl.processes.role_runtime import stop_event\n"
        "event = stop_event()\n"
        "with event._cond: signal.raise_signal(signal.SIGTERM)\n"
        "assert event.wait(60.0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120.0)


def test_a_role_without_a_key_says_how_to_make_one(tmp_path: Path) -> None:
    """One clear line, before any connection."""
    folder = RunFolder(tmp_path)
    create_keys(folder.keys, [QWEN])
    revoke_client_key(folder.keys, "worker/qwen")
    with (
        ExitStack() as closing,
        pytest.raises(RunFolderError, match=r"key of worker/qwen does not exist.*make worker qwen"),
    ):
        role_runtime.link(folder, "exchange", identity="worker/qwen/0", on_message=lambda _: None, closing=closing)


def test_what_nobody_foresaw_is_told_with_its_kind_and_the_users_own_line(tmp_path, monkeypatch, capsys) -> None:
    """A bare KeyError says no more than a key; deeper lines are those of the library that the user's code calls."""
    (tmp_path / "own_code.py").write_text("import json\n\n\ndef read(text):\n    return json.loads(text)\n")
    monkeypatch.setenv(MODULES, str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="Expecting value") as raised:
        importlib.import_module("own_code").read("[")
    assert role_runtime._end(tmp_path, "learner/qwen", raised.value, 1, unforeseen=True) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("learner/qwen: JSONDecodeError: Expecting value")
    assert said.endswith(f"({tmp_path / 'own_code.py'}:5 in read)")


def test_a_role_is_heard_until_it_ends() -> None:
    """Heartbeats and spans come by themselves; at the end comes what it was still doing."""
    with tempfile.TemporaryDirectory(prefix="mrl-") as place, ExitStack() as closing:
        folder = RunFolder(Path(place))
        server = ServerSocket(create_keys(folder.keys, [QWEN]))
        closing.callback(server.close)
        publish_endpoint(folder.endpoints, "telemetry", server.address, server.ipc_path)
        ending = ExitStack()
        telemetry = role_runtime.connect_telemetry(folder, "worker/qwen/0", "qwen", ending)
        heard = records(server)
        telemetry.doing("sampling")
        assert "starting" in spans_of(heard)
        assert any(isinstance(record, HeartbeatRecord) for record in heard)
        ending.close()
        assert "sampling" in spans_of(heard)


def test_what_a_role_says_at_its_end_is_written_once_though_nobody_listens() -> None:
    """A supervisor that stands still finds it in a file, and again on the link as far as it had left."""
    with tempfile.TemporaryDirectory(prefix="mrl-") as place, ExitStack() as closing:
        folder = RunFolder(Path(place))
        server = ServerSocket(create_keys(folder.keys, [QWEN]))
        closing.callback(server.close)
        publish_endpoint(folder.endpoints, "telemetry", server.address, server.ipc_path)
        ending = ExitStack()
        telemetry = role_runtime.connect_telemetry(folder, "worker/qwen/0", "qwen", ending)
        assert any(isinstance(record, HeartbeatRecord) for record in records(server))
        for step in range(200):
            telemetry.metrics(step, {"reward/mean": 0.5})
        ending.close()
        files = RunFiles(folder)
        assert any(folder.unheard.iterdir())
        files.left.take(files.write)
        on_link = [record for record in records(server, 1.0) if isinstance(record, MetricsRecord)]
        assert on_link
        assert all(files.left.had(record) for record in on_link)
        files.close()
        assert [row["step"] for row in each_metrics(folder.metrics_jsonl)] == list(range(200))
        assert not any(folder.unheard.iterdir())


def records(server: ServerSocket, for_s: float = 60.0) -> Iterator[TelemetryRecord]:
    """What comes, for a minute."""
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        yield from (decode(incoming.body, inbox_decoder) for incoming in server.receive(0.1))


def spans_of(heard: Iterator[TelemetryRecord]) -> Iterator[str]:
    """The kinds of the spans among them."""
    return (span.kind for record in heard if isinstance(record, SpansRecord) for span in record.spans)


def receive_one(server: ServerSocket) -> Incoming:
    """The first message, within a minute."""
    end_s = time.monotonic() + 60.0
    while time.monotonic() < end_s:
        if received := server.receive(0.1):
            return received[0]
    raise AssertionError("nothing came within 60 s")


@pytest.mark.parametrize(("devices", "code"), [("", 2), ("0", 1)])
def test_memory_that_runs_out_on_a_shared_device_may_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str, code: int
) -> None:
    """The driver gives a dead process's back a while later: what exits with 1 is started again."""
    monkeypatch.setenv(TURN_DEVICES, devices)
    monkeypatch.setattr(role_runtime, "load", lambda _: (None, RunFolder(tmp_path)))
    ends: list[int] = []
    monkeypatch.setattr(role_runtime, "_end", lambda _, role, error, code: ends.append(code))

    def body(*_: object) -> int:
        with enough_memory("here", where="there", cure="less"):
            raise MemoryError

    def mistake(*_: object) -> int:
        raise DeviceError("no GPU") from ValueError()

    for work in (body, mistake):
        role_runtime.run_role(tmp_path, "worker/a/0", "a", work)
    assert ends == [code, 2]
