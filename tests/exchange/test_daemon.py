"""The daemon as a process of its own, over real sockets."""

import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from mrl.exchange.client import ExchangeClient
from mrl.exchange.store import FILE
from mrl.records.version import Version
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.endpoints import nearest_endpoint, port_of, read_endpoint
from mrl.transport.grants import grant_of
from mrl.transport.keys import load_client_keys
from mrl.transport.server import ServerSocket

pytestmark = pytest.mark.system  # real processes

DAEMON = textwrap.dedent("""
    import resource, signal, sys, time
    from pathlib import Path
    from mrl.exchange.daemon import ExchangeDaemon
    from mrl.exchange.limits import Limits
    from mrl.transport.keys import load_keys

    run, max_file_bytes = Path(sys.argv[1]), int(sys.argv[2])
    if max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))
    daemon = ExchangeDaemon(
        run / "exchange", run / "endpoints", load_keys(run / "keys"), host="127.0.0.1", port=0,
        limits=Limits(budget_bytes=64_000_000), clock=time.monotonic,
    )
    print(len(daemon.core.index), flush=True)
    is_over = []
    signal.signal(signal.SIGTERM, lambda *_: is_over.append(1))
    while not is_over:
        daemon.round(0.1)
    daemon.close()
""")


@pytest.fixture
def run(tmp_path, keys):
    """A run folder with keys."""
    shutil.copytree(keys.folder, tmp_path / "keys")
    return tmp_path


@pytest.fixture
def start(run, temporary):
    """Starts daemon processes; returns (process, records found in its file)."""
    processes = []

    def start_daemon(max_file_bytes=0):
        process = subprocess.Popen(
            [sys.executable, "-c", DAEMON, str(run), str(max_file_bytes)],
            stdout=subprocess.PIPE,
            env=temporary,
            text=True,
        )
        processes.append(process)
        return process, int(process.stdout.readline())

    yield start_daemon
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def kill(process):
    """End it the hard way and wait until it is gone."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def connect(run, keys):
    """Makes clients over real links."""
    clients = []

    def connect_client(name, policy):
        def open_link(on_message, on_tick):
            own = load_client_keys(run / "keys", grant_of(name))
            socket = ClientSocket(own, lambda: nearest_endpoint(run / "endpoints", "exchange"), identity=name)
            return BackgroundClient(socket, on_message=on_message, on_tick=on_tick)

        clients.append(ExchangeClient.connect(open_link, client=name, policy=policy))
        return clients[-1]

    yield connect_client
    for client in clients:
        client.close(0.0)


def taken(client, received):
    """Ids of everything taken so far."""
    received.extend(client.take())
    return {item.record.record_id for item in received}


def test_acknowledged_records_survive_kill_9(start, connect, outcome, until):
    """The daemon is killed while records stream in; its successor holds everything that was acknowledged."""
    process, found = start()
    assert found == 0
    worker = connect("worker/qwen/0", "qwen")
    for number in range(2000):
        worker.publish([outcome(f"r{number}", prompt_id=f"p{number}")])
    until(lambda: worker.counts.get("stored", 0) >= 200)
    kill(process)
    acknowledged = worker.counts["stored"]
    _, found = start()
    assert acknowledged <= found <= 2000
    until(lambda: worker.counts["stored"] + worker.counts.get("refused/duplicate", 0) >= 2000)
    learner = connect("learner/llama", "llama")
    learner.fetch([f"p{number}" for number in range(2000)], kinds=["outcome"], limit=1, max_age_versions=None)
    received = []
    assert until(lambda: len(taken(learner, received)) == 2000)
    assert {item.record.completion for item in received} == {b"yah"}


def test_clients_find_a_restarted_daemon_and_their_watches_work(start, connect, outcome, until, run, keys):
    """Its old port is taken meanwhile, so it listens elsewhere; nobody is told but by the endpoint file."""
    process, _ = start()
    worker, learner = connect("worker/qwen/0", "qwen"), connect("learner/llama", "llama")
    worker.announce(Version(0, 3))
    learner.fetch(["p1"], kinds=["outcome"], limit=4, max_age_versions=None)
    received = []
    worker.publish([outcome("before", step=3)])
    until(lambda: "before" in taken(learner, received))
    old_port = port_of(read_endpoint(run / "endpoints", "exchange"))
    kill(process)
    squatter = ServerSocket(keys, host="127.0.0.1", port=old_port)
    try:
        start()
        assert port_of(read_endpoint(run / "endpoints", "exchange")) != old_port
        learner.fetch(["p2"], kinds=["outcome"], limit=4, max_age_versions=None)
        worker.publish([outcome("after", prompt_id="p2", step=3)])
        until(lambda: "after" in taken(learner, received))
    finally:
        squatter.close()
    assert learner.lost_s() == 0.0
    worker.publish([outcome("on the old watch", step=3)])
    until(lambda: "on the old watch" in taken(learner, received))


def test_a_restarted_daemon_takes_its_old_port_again(start, run):
    """When it is free, so that clients need not search."""
    process, _ = start()
    before = read_endpoint(run / "endpoints", "exchange")
    kill(process)
    start()
    assert read_endpoint(run / "endpoints", "exchange") == before


def test_a_full_disk_is_said_and_survived(start, connect, outcome, until):
    """Nothing is acknowledged that could not be written; as soon as there is room again, everything is."""
    process, _ = start(max_file_bytes=400_000)
    worker = connect("worker/qwen/0", "qwen")
    for number in range(20):
        worker.publish([outcome(f"r{number}", prompt_id=f"p{number}", completion=bytes(40_000))])
    until(lambda: worker.storage == "disk_full")
    assert 0 < worker.counts["stored"] < 20
    assert not worker.flush(0.5)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert worker.flush(120.0)
    assert (worker.counts["stored"], worker.storage, process.poll()) == (20, "", None)
    kill(process)
    assert start()[1] == 20


def test_a_batch_of_groups_is_published_flushed_and_fetched(start, connect, rollout):
    """More than may be unacknowledged or in one message at once, over real links, within seconds."""
    start()
    worker, learner = connect("worker/qwen/0", "qwen"), connect("learner/llama", "llama")
    records = [rollout(f"g{n}", prompt_id=f"p{n}", group=8, tokens=2000) for n in range(80)]
    worker.publish(records, room_within_s=120.0)
    assert worker.flush(120.0)
    assert worker.counts["stored"] == 80
    prompt_ids = [f"p{n}" for n in range(81)]
    assert learner.fetch_now(prompt_ids, kinds=["rollout"], limit=4, max_age_versions=None, timeout_s=120.0)
    assert sorted((item.record for item in learner.take()), key=lambda record: int(record.record_id[1:])) == records


def test_policies_in_step_outlive_the_daemon(start, connect):
    """Both pass one barrier after the other, each on a thread, while the daemon is killed and started again."""
    process, _ = start()
    members = ["llama", "qwen"]
    came = {policy: connect(f"learner/{policy}", policy) for policy in members}
    passed = dict.fromkeys(members, -1)

    def walk(policy, until_number):
        for number in range(passed[policy] + 1, until_number):
            if came[policy].barrier(number, members, 120.0):
                return
            assert min(passed.values()) >= number - 1
            passed[policy] = number

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(walk, members, [50, 50]))
        assert set(passed.values()) == {49}
        first = pool.submit(walk, "llama", 100)
        kill(process)
        start()
        walk("qwen", 100)
        first.result()
    assert set(passed.values()) == {99}


def test_requests_reach_engines_and_scores_come_back(start, connect, until, request_for, score_of):
    """Two engines share twenty requests; the student's watch brings every score."""
    start()
    worker, student = connect("worker/qwen/0", "qwen"), connect("learner/qwen", "qwen")
    engines = [connect(f"worker/llama/{number}", "llama") for number in range(2)]
    for engine in engines:
        engine.subscribe(["score_request"])
    requests = [request_for("llama", f"q{n}", prompt_id=f"p{n}") for n in range(20)]
    student.fetch([f"p{n}" for n in range(20)], kinds=["score"], limit=1, max_age_versions=None)
    worker.publish(requests)
    served, received = [0, 0], []

    def serve():
        for number, engine in enumerate(engines):
            asked = [item.record for item in engine.take()]
            served[number] += len(asked)
            engine.publish([score_of(request, f"s-{request.record_id}") for request in asked])
        return len(taken(student, received)) == 20

    until(serve)
    assert sum(served) == 20
    assert {item.record.request_id for item in received} == {request.record_id for request in requests}


def inspect(*arguments):
    """Run the inspection tool; returns (exit code, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "mrl", "inspect", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": ".", "COLUMNS": "160"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_inspect_shows_what_flows(start, run, connect, outcome, until):
    """Table and JSON name the policies, what is held, and the flow between them."""
    start()
    worker, learner = connect("worker/qwen/0", "qwen"), connect("learner/llama", "llama")
    learner.fetch(["p1", "p2"], kinds=["outcome"], limit=4, max_age_versions=None)
    until(lambda: learner.counts.get("hellos", 0) == 0 and learner.lost_s() == 0.0)
    worker.publish([outcome()])
    received = []
    until(lambda: taken(learner, received))
    code, out, _ = inspect(run, "--json")
    content = json.loads(out)
    [flow] = [flow for flow in content["flows"] if flow["source"] == "qwen"]
    assert (code, flow["receiver"], flow["asked"], flow["hits"], flow["hit_rate"]) == (0, "llama", 2, 1, 0.5)
    assert flow["records_per_s"] > 0
    code, out, _ = inspect(run)
    assert code == 0
    assert all(word in out for word in ("qwen", "llama", "0.50", "hit rate", "refused", "watched"))


def test_inspect_without_a_daemon_is_one_clear_line(run, tmp_path):
    """Exit code 2 within a few seconds."""
    for folder, words in ((run, "no exchange daemon"), (tmp_path / "nowhere", "keys")):
        code, out, err = inspect(folder)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_a_finished_daemon_leaves_one_file(start, connect, outcome, until, run):
    """Told to stop, it copies everything to its place: the file alone can be carried away and opened."""
    process, _ = start()
    worker = connect("worker/qwen/0", "qwen")
    worker.publish([outcome("r1")])
    until(lambda: worker.counts.get("stored"))
    process.terminate()
    assert process.wait(120) == 0
    assert sorted(path.name for path in (run / "exchange").iterdir()) == [FILE, "lock"]
    with sqlite3.connect(run / "exchange" / FILE) as connection:
        assert connection.execute("SELECT record_id, source, reward FROM records").fetchall() == [("r1", "qwen", 1.0)]
