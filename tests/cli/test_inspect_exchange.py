"""`mrl inspect` against a real daemon, and against the file that one left."""

import json
import threading
import time
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.exchange.client import ExchangeClient
from mrl.exchange.daemon import ExchangeDaemon
from mrl.exchange.limits import Limits
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.endpoints import nearest_endpoint
from mrl.transport.grants import Grant, grant_of
from mrl.transport.keys import create_keys, load_client_keys
from tests.support.successes import success

pytestmark = pytest.mark.system  # real sockets

POLICIES = ("qwen", "llama")


def outcome(record_id, prompt_id="p1"):
    """A success of qwen's."""
    return success(record_id, prompt_id=prompt_id, step=3, completion=b"reverse: yah")


def until(what, within_s=120.0):
    """Ask again and again until it is true."""
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s


class Exchange:
    """A run folder with a daemon on a thread, and clients."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys = create_keys(
            path / "keys", [Grant(role, policy) for role in ("learner", "worker") for policy in POLICIES]
        )
        self._running, self._clients = None, []

    def start(self):
        """A daemon on the folder as it is."""
        daemon = ExchangeDaemon(
            self.path / "exchange", self.path / "endpoints", self.keys, host="127.0.0.1", port=0,
            limits=Limits(budget_bytes=4_000_000, durability="written"), clock=time.monotonic,
        )  # fmt: skip
        end = threading.Event()

        def serve():
            while not end.is_set():
                daemon.round(0.02)
            daemon.close()

        thread = threading.Thread(target=serve)
        thread.start()
        self._running = end, thread

    def stop(self):
        """It is gone when this returns."""
        (end, thread), self._running = self._running, None
        end.set()
        thread.join()

    def connect(self, name):
        """A client over a real link."""
        policy = name.split("/")[1]

        def open_link(on_message, on_tick):
            keys = load_client_keys(self.path / "keys", grant_of(name))
            socket = ClientSocket(keys, lambda: nearest_endpoint(self.path / "endpoints", "exchange"), identity=name)
            return BackgroundClient(socket, on_message=on_message, on_tick=on_tick)

        self._clients.append(ExchangeClient.connect(open_link, client=name, policy=policy))
        return self._clients[-1]

    def close(self):
        """End everything that was started."""
        for client in self._clients:
            client.close(0.0)
        if self._running:
            self.stop()


@pytest.fixture
def exchange(tmp_path):
    """An exchange with its daemon."""
    exchange = Exchange(tmp_path)
    exchange.start()
    yield exchange
    exchange.close()


def inspect(capsys, *arguments):
    """(exit code, stdout, stderr)."""
    capsys.readouterr()
    code = main(["inspect", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_record_is_dumped_from_the_file_with_and_without_a_daemon(exchange, capsys):
    """By SELECT, also while a daemon writes."""
    worker = exchange.connect("worker/qwen/0")
    worker.publish([outcome("r1"), outcome("r2", "p2")])
    assert worker.flush(120.0)
    code, out, _ = inspect(capsys, exchange.path, "--dump", "r2")
    assert (code, "number 2 in" in out, "'prompt_id': 'p2'" in out) == (0, True, True)
    exchange.stop()
    code, out, _ = inspect(capsys, exchange.path, "--dump", "r2")
    assert (code, "exchange.sqlite" in out, "'prompt_id': 'p2'" in out) == (0, True, True)
    code, out, err = inspect(capsys, exchange.path, "--dump", "r3")
    assert (code, out, err.count("\n"), "no such record" in err) == (2, "", 1, True)


def test_without_a_daemon_the_file_is_shown(exchange, capsys):
    """As a table and as JSON."""
    worker = exchange.connect("worker/qwen/0")
    worker.publish([outcome("r1"), outcome("r2", "p2")])
    assert worker.flush(120.0)
    exchange.stop()
    code, out, _ = inspect(capsys, exchange.path)
    assert (code, "no exchange daemon answers" in out, "outcome 2" in out) == (0, True, True)
    _, out, _ = inspect(capsys, exchange.path, "--json")
    [policy_stat] = json.loads(out)["policies"]
    assert (policy_stat["policy"], policy_stat["records"], policy_stat["put"]) == ("qwen", 2, 2)


def test_json_has_the_rates(exchange, capsys):
    """Beside the daemon's own numbers."""
    worker = exchange.connect("worker/qwen/0")
    worker.publish([outcome("r1"), outcome("r1")])
    assert worker.flush(120.0)
    _, out, _ = inspect(capsys, exchange.path, "--json")
    [policy_stat] = json.loads(out)["policies"]
    assert (policy_stat["put"], policy_stat["refused"]) == (1, {"duplicate": 1})
    assert policy_stat["put_per_s"] > 0
    assert policy_stat["refused_per_s"]["duplicate"] > 0


@pytest.mark.parametrize("words", [["--watch", "-1"], ["--watch", "nan"], ["--watch", "0"], ["--watch", "1e9"],
                                   ["--watch", "soon"], ["--json", "--dump", "r1"]])  # fmt: skip
def test_what_cannot_be_meant_is_one_line(words, tmp_path, capsys):
    """No traceback, and nothing is asked or read."""
    code = 0
    try:
        code = main(["inspect", str(tmp_path), *words])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    wanted = "cannot be combined" if words[0] == "--json" else "wanted 0.05 to 86400 seconds"
    assert (code, captured.out, captured.err.count("\n"), wanted in captured.err) == (2, "", 1, True)
