"""The exchange role: its metrics, and its life as a process."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from mrl.exchange.archive import read_records
from mrl.exchange.limits import MIB, Limits
from mrl.exchange.record_index import Entry
from mrl.exchange.store import Store
from mrl.exchange.transaction import Transaction
from mrl.metrics.names import is_known
from mrl.processes.exchange import LOG_BYTES, metrics_of, tell_length
from mrl.records.codec import encode
from mrl.records.exchange_messages import Announce, Fetch, Hello
from mrl.records.experience import ValueRecord
from mrl.records.tags import tags_of
from mrl.records.version import Version
from mrl.transport.endpoints import nearest_endpoint, read_endpoint
from mrl.transport.keys import create_keys
from tests.support.stored_core import StoredCore

ROLE = "import sys, pathlib; from mrl.processes.exchange import main; sys.exit(main(pathlib.Path(sys.argv[1]), '', 0))"


def test_every_metric_is_in_the_table():
    """Also those of a pair of policies."""
    core = StoredCore()
    core.handle(b"l", Hello(client="l", policy="llama"), 0.0)
    core.handle(b"q", Hello(client="q", policy="qwen"), 0.0)
    core.handle(b"q", Announce(client="q", policy="qwen", version=Version(0, 3)), 0.0)
    ask = Fetch(client="l", policy="llama", prompt_ids=["p"], limit=1, max_age_versions=None, watch=True)
    core.handle(b"l", ask, 0.0)
    values = metrics_of(core.stat(1.0))
    assert values["exchange/flow_hit_rate/qwen/llama"] == 0.0
    assert [name for name in values if not is_known(name)] == []


def test_a_reader_without_an_end_is_told_of():
    """What is written while somebody reads stays in the file's log; told once, and again when it has doubled."""
    stat, told, bytes_told = StoredCore().stat(1.0), [], 0
    least = stat.budget_bytes + LOG_BYTES
    for length in (0, least - 1, least, 2 * least - 1, 2 * least, 0, least):
        with capture_logs() as logs:
            bytes_told = tell_length(structs.replace(stat, file_bytes=length), bytes_told)
        told += [(one["log_level"], one["mib"]) for one in logs]
    assert told == [("warning", length // MIB) for length in (least, 2 * least, least)]


@pytest.fixture
def run(tmp_path):
    """A run folder with the least that the role reads."""
    config = {
        "run": {"name": "r", "steps": 1},
        "tasks": {"reverse": {"source": "words", "dataset": "reverse"}},
        "policies": {"qwen": {"model": "/nowhere"}},
        "exchange": {"metrics_host": "127.0.0.1"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    create_keys(tmp_path / "keys")
    return tmp_path


@pytest.fixture
def start(run, temporary):
    """Starts the role in a process of its own."""
    processes = []

    def start_role():
        process = subprocess.Popen(
            [sys.executable, "-c", ROLE, str(run)], stderr=subprocess.PIPE, env=temporary, text=True
        )
        processes.append(process)
        return process

    yield start_role
    for process in processes:
        process.kill()
        process.communicate()


def wait_until_serving(process):
    """Read its log until it serves its metrics, which comes last."""
    for line in process.stderr:
        if "serves its metrics" in line:
            return
    raise AssertionError("the role ended early")


@pytest.mark.system
def test_sigterm_ends_the_role_at_once(start, run):
    """Exit code 0, with the endpoint published before."""
    process = start()
    wait_until_serving(process)
    assert nearest_endpoint(run / "endpoints", "exchange").startswith("ipc://")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0


@pytest.mark.system
def test_a_second_daemon_of_the_run_is_refused(start):
    """Exit code 2 and the cure in the last line."""
    wait_until_serving(start())
    second = start()
    _, stderr = second.communicate(timeout=120)
    assert second.returncode == 2
    assert "another exchange daemon" in stderr.splitlines()[-1]


@pytest.mark.system
def test_the_role_shows_its_metrics_while_it_serves(start, run):
    """Handed over anew while it runs; gone with the role."""
    process = start()
    wait_until_serving(process)
    url = read_endpoint(run / "endpoints", "exchange-metrics").replace("tcp://", "http://")

    def uptime_s():
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith("mrl_exchange_uptime_seconds ")).split()[1])

    first_s, end_s = uptime_s(), time.monotonic() + 60
    while uptime_s() == first_s:
        assert time.monotonic() < end_s
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0
    with pytest.raises(urllib.error.URLError):
        uptime_s()


@pytest.mark.system
def test_the_role_begins_with_the_records_of_a_run_that_ended(run, start, tmp_path):
    """Under the names that the configuration gives them; the role that is started again has them once."""
    tags = {"record_id": "r", "source": "llama", "fingerprint": "f", "prompt_id": "p", "task": "t"}
    version = {"oldest": Version(0, 9), "newest": Version(0, 9)}
    body = encode(ValueRecord(**tags, **version, created_unix_s=0.0, rewards=[1.0]))
    store = Store(tmp_path / "old" / "exchange", Limits())
    store.commit(Transaction(inserts=[Entry(1, tags_of(body), body)]))
    store.close()
    config = json.loads((run / "config.json").read_text())
    replay = {"run": str(tmp_path / "old"), "policies": ["llama"], "prefix": "old"}
    (run / "config.json").write_text(json.dumps(config | {"sharing": {"regime": "xgrpo", "replay": replay}}))
    for _ in range(2):
        process = start()
        wait_until_serving(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
        assert [record.source for record in read_records(run / "exchange")] == ["old.llama"]
