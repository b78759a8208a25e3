"""The inspection tool against a real daemon: what it shows, dumps, and drains."""

import json
import threading
import time
from pathlib import Path

import pytest
from inspect_see import main
from mrl.exchange.shards import endpoint_of, folder_of

from mrl.exchange.client import ExchangeClient
from mrl.exchange.daemon import ExchangeDaemon, Limits
from mrl.records.experience import OutcomeRecord
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.transport.background import BackgroundClient
from mrl.transport.client import ClientSocket
from mrl.transport.endpoints import read_endpoint
from mrl.transport.grants import Grant, grant_of
from mrl.transport.keys import create_keys, load_client_keys

pytestmark = pytest.mark.system  # real sockets

POLICIES = ("qwen", "llama")


def outcome(record_id, prompt_id="p1"):
    """A success of qwen's."""
    version = Version(0, 3)
    return OutcomeRecord(
        record_id=record_id, source="qwen", oldest=version, newest=version, fingerprint="f", prompt_id=prompt_id,
        task="t", created_unix_s=0.0, completion=b"reverse: yah", finish_reason=FinishReason.STOP, verifier="v",
        reward=1.0,
    )  # fmt: skip


def until(what, within_s=10.0):
    """Ask again and again until it is true."""
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s


class Exchange:
    """A run folder with daemons, each on a thread, and clients."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys = create_keys(
            path / "keys", [Grant(role, policy) for role in ("learner", "worker") for policy in POLICIES]
        )
        self._running, self._clients = {}, []

    def start(self, shard=0):
        """A daemon on the folder as it is."""
        daemon = ExchangeDaemon(
            folder_of(self.path / "exchange", shard), self.path / "endpoints", self.keys, host="127.0.0.1", port=0,
            limits=Limits(budget_bytes=4_000_000, log_bytes=16_000_000, durability="written"), clock=time.monotonic,
            endpoint=endpoint_of(shard),
        )  # fmt: skip
        end = threading.Event()

        def serve():
            while not end.is_set():
                daemon.round(0.02)
            daemon.close()

        thread = threading.Thread(target=serve)
        thread.start()
        self._running[shard] = end, thread

    def stop(self, shard=0):
        """It is gone when this returns."""
        end, thread = self._running.pop(shard)
        end.set()
        thread.join()

    def connect(self, name):
        """A client over a real link to the first daemon."""
        policy = name.split("/")[1]

        def open_link(on_message, on_tick):
            keys = load_client_keys(self.path / "keys", grant_of(name))
            socket = ClientSocket(keys, lambda: read_endpoint(self.path / "endpoints", "exchange"), identity=name)
            return BackgroundClient(socket, on_message=on_message, on_tick=on_tick)

        self._clients.append(ExchangeClient.connect(open_link, client=name, policy=policy))
        return self._clients[-1]

    def close(self):
        """End everything that was started."""
        for client in self._clients:
            client.close(0.0)
        for shard in list(self._running):
            self.stop(shard)


@pytest.fixture
def exchange(tmp_path):
    """An exchange with one daemon."""
    exchange = Exchange(tmp_path)
    exchange.start()
    yield exchange
    exchange.close()


def inspect(capsys, *arguments):
    """(exit code, stdout, stderr)."""
    capsys.readouterr()
    code = main([*map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def ask(client):
    """From now on the daemon holds successes one by one; what the client says later comes later."""
    client.fetch(["p1"], kinds=["outcome"], limit=1, max_age_versions=None, watch=False)


def test_a_record_is_dumped_from_the_daemon_and_then_from_its_log(exchange, capsys):
    """Held; and when the daemon is gone, from the segments."""
    worker = exchange.connect("worker/qwen/0")
    worker.publish([outcome("r1"), outcome("r2", "p2")])
    assert worker.flush(10.0)
    code, out, _ = inspect(capsys, exchange.path, "--dump", "r2")
    assert (code, "though perhaps in a pack; on the log in" in out) == (0, True)
    ask(worker)
    worker.publish([outcome("r4")])
    assert worker.flush(10.0)
    code, out, _ = inspect(capsys, exchange.path, "--dump", "r2")
    assert code == 0
    assert "held by the daemon, record number 2 of the exchange, 0 versions old" in out
    assert 'completion: 12 bytes "reverse: yah"' in out
    exchange.stop()
    code, out, _ = inspect(capsys, exchange.path, "--dump", "r2")
    assert code == 0
    assert "no daemon answers; on the log in" in out
    assert "as a record: whole, OutcomeRecord" in out
    code, out, err = inspect(capsys, exchange.path, "--dump", "r3")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no such record or file (no daemon answers, and not on the log); got 'r3'" in err


def test_a_file_is_dumped_without_asking_anybody(exchange, capsys, tmp_path):
    """A segment of the log, beside the daemon that writes it."""
    worker = exchange.connect("worker/qwen/0")
    worker.publish([outcome("r1")])
    assert worker.flush(10.0)
    [segment] = (exchange.path / "exchange").glob("*.segment")
    code, out, _ = inspect(capsys, exchange.path, "--dump", segment)
    assert code == 0
    assert "checksums hold" in out
    assert 'record_id: "r1"' in out


def test_a_drain_ends_when_all_was_delivered(exchange, capsys):
    """Nothing more is taken, and what the client holds back is taken after --undrain."""
    worker, learner = exchange.connect("worker/qwen/0"), exchange.connect("learner/llama")
    worker.publish([outcome("r1")])
    assert worker.flush(10.0)
    learner.read("all", kinds=["outcome"])
    code, out, err = inspect(capsys, exchange.path, "--drain", "20")
    assert (code, err) == (0, "")
    assert out.startswith("drained: everything was delivered")
    assert [item.record.record_id for item in learner.take()] == ["r1"]
    until(lambda: worker.storage == "draining")
    worker.publish([outcome("r2", "p2")])
    assert not worker.flush(0.3)
    assert worker.counts["stored"] == 1
    code, out, _ = inspect(capsys, exchange.path)
    assert "storage: draining" in out
    assert inspect(capsys, exchange.path, "--undrain")[:2] == (0, "Puts are taken again\n")
    assert worker.flush(20.0)
    assert worker.counts["stored"] == 2


def test_a_drain_that_does_not_end_names_what_is_left(exchange, capsys):
    """Within its bound; a restarted daemon takes Puts again."""
    worker, learner = exchange.connect("worker/qwen/0"), exchange.connect("learner/llama")
    learner.read("all", kinds=["outcome"])
    learner.announce(Version(0, 1))
    until(lambda: "all" in inspect(capsys, exchange.path)[1])
    learner.close(1.0)
    worker.publish([outcome("r1")])
    assert worker.flush(10.0)
    code, out, err = inspect(capsys, exchange.path, "--drain", "0.2")
    assert (code, out) == (1, "")
    assert "not drained within 0.2 s: stream all of llama" in err
    exchange.stop()
    exchange.start()
    worker.publish([outcome("r2", "p2")])
    assert worker.flush(20.0)


def test_every_shard_is_shown_asked_and_drained(exchange, capsys):
    """As many daemons as have said where they listen."""
    exchange.start(1)
    _, out, _ = inspect(capsys, exchange.path, "--json")
    assert [json.loads(line)["shard"] for line in out.splitlines()] == [0, 1]
    _, out, _ = inspect(capsys, exchange.path)
    assert "exchange shard 1" in out
    assert inspect(capsys, exchange.path, "--drain", "5")[0] == 0
    _, out, _ = inspect(capsys, exchange.path, "--json")
    assert [json.loads(line)["storage"] for line in out.splitlines()] == ["draining"] * 2
    exchange.stop(1)
    code, _, err = inspect(capsys, exchange.path)
    assert code == 2
    assert "shard 1 did not answer within 2 s" in err


def test_json_has_the_rates(exchange, capsys):
    """Beside the daemon's own numbers."""
    worker = exchange.connect("worker/qwen/0")
    ask(worker)
    worker.publish([outcome("r1"), outcome("r1")])
    assert worker.flush(10.0)
    _, out, _ = inspect(capsys, exchange.path, "--json")
    [shelf] = json.loads(out)["shelves"]
    assert (shelf["put"], shelf["refused"]) == (1, {"duplicate": 1})
    assert shelf["put_per_s"] > 0
    assert shelf["refused_per_s"]["duplicate"] > 0
