"""Who gets through to a server, over real sockets: wrong, unknown and revoked keys, borrowed names, no keys at all."""

import contextlib
import os
import socket
import time

import pytest
import zmq
from structlog.testing import capture_logs

from mrl.transport.endpoints import port_of
from mrl.transport.grants import Grant
from mrl.transport.keys import (
    ClientKeys,
    client_file,
    create_keys,
    load_client_keys,
    make_client_key,
    revoke_client_key,
)

QWEN = Grant("worker", "qwen")
WORKER = b"worker/qwen/0"


def refused(server, until, reason):
    """Serve until something was refused for this reason; returns what was let through meanwhile."""
    received = []
    until(lambda: received.extend(server.receive(0.05)) or server.refusals.counts().get(reason, 0))
    return received


def is_served(server, client, until):
    """Whether a body comes through and its answer back; says so by failing otherwise."""
    until(lambda: client.send(b"hello") or client.wait(0.02))
    [incoming] = until(lambda: server.receive(0.05))
    assert server.send(incoming.client, b"welcome")
    return until(lambda: client.receive(0.05)) == [b"welcome"]


@pytest.fixture
def other_run(tmp_path):
    """The keys of another run."""
    return create_keys(tmp_path / "other" / "keys", [QWEN])


def test_a_key_of_another_run_is_refused(make_server, make_client, until, keys, other_run):
    """It is well-formed, but not on the list."""
    foreign = load_client_keys(other_run.folder, QWEN)
    server = make_server()
    client = make_client(server.address, with_keys=ClientKeys(keys.server_public, foreign.public, foreign.secret))
    assert refused(server, until, "unknown_key") == []
    assert client.send(b"let me in") is False
    assert server.refusals.counts().get("unknown_key", 0) > 0


def test_a_client_that_expects_another_server_sends_nothing(make_server, make_client, until, keys, other_run):
    """The handshake fails before either side has said anything."""
    own = load_client_keys(keys.folder, QWEN)
    server = make_server()
    client = make_client(server.address, with_keys=ClientKeys(other_run.server_public, own.public, own.secret))
    assert refused(server, until, "handshake") == []
    assert client.send(b"are you the one?") is False


def test_a_revoked_key_cannot_connect(make_server, make_client, until, keys):
    """The reason says that it was allowed once."""
    with_keys = load_client_keys(keys.folder, QWEN)
    revoke_client_key(keys.folder, "worker/qwen")
    server = make_server()
    make_client(server.address, with_keys=with_keys)
    assert refused(server, until, "revoked_key") == []


@pytest.mark.parametrize("is_talking", [True, False], ids=["talking", "silent"])
def test_a_key_revoked_while_connected_loses_its_link(make_server, make_client, until, keys, is_talking):
    """It is neither heard nor answered, its connection ends, and it is refused when it returns."""
    server = make_server()
    client, other = make_client(server.address), make_client(server.address, "worker/llama/0")
    assert is_served(server, client, until)
    revoke_client_key(keys.folder, "worker/qwen")
    end_s = time.monotonic() + 120.0
    heard_after = []
    is_sending = True
    while is_sending or server.refusals.counts().get("revoked_key", 0) < 2:  # the link, and its return
        assert time.monotonic() < end_s
        was_refused = server.refusals.counts().get("revoked_key", 0) > 0
        heard_after += [message for message in server.receive(0.02) if was_refused and message.client == WORKER]
        is_sending = is_talking and client.send(b"still here")
    assert heard_after == []
    assert server.send(WORKER, b"secret") is False
    assert client.send(b"let me in again") is False
    assert is_served(server, other, until)


def test_a_link_that_first_speaks_after_its_key_was_revoked_is_cut(make_server, make_client, until, keys):
    """It connected in time, so that only its message can be refused."""
    server = make_server()
    client = make_client(server.address)
    until(lambda: client.send(b"in time") or client.wait(0.02))
    revoke_client_key(keys.folder, "worker/qwen")
    server.reload()
    assert refused(server, until, "revoked_key") == []
    until(lambda: server.receive(0.02) or not client.send(b"still there?"))


def test_a_new_key_of_the_same_name_is_let_in_while_the_server_runs(make_server, make_client, until, keys):
    """Revoking and making again is how a key is changed."""
    server = make_server()
    revoke_client_key(keys.folder, "worker/qwen")
    make_client_key(keys.folder, QWEN)
    server.reload()
    assert is_served(server, make_client(server.address), until)


def test_a_damaged_allow_list_leaves_the_one_before_in_force(make_server, make_client, until, keys):
    """A slip of the editor neither ends the server nor lets anybody in or out."""
    server = make_server()
    client = make_client(server.address)
    assert is_served(server, client, until)
    (keys.folder / "allowed.json").write_text("{")
    server.reload()
    assert server.refusals.counts() == {"allow_list": 1}
    assert is_served(server, client, until)


@pytest.mark.parametrize(
    ("claimed", "key"),
    [
        ("worker/qwen/0", Grant("worker", "llama")),
        ("learner/llama", Grant("worker", "llama")),
        ("learner/qwen", Grant("admin")),
        ("worker/llamas", Grant("worker", "llama")),
    ],
    ids=["another policy", "another role", "a person", "a longer name"],
)
def test_a_name_that_the_key_does_not_cover_is_dropped(make_server, make_client, until, keys, claimed, key):
    """The messages are counted, and the server goes on."""
    server = make_server()
    thief = make_client(server.address, claimed, with_keys=load_client_keys(keys.folder, key))
    until(lambda: thief.send(b"trust me") or thief.wait(0.02))
    with capture_logs() as lines:
        assert refused(server, until, "impersonation") == []
    assert [(line["name"], line["claims"]) for line in lines] == [(key.name, ascii(claimed.encode()))]
    assert server.send(claimed.encode(), b"secret") is False
    assert is_served(server, make_client(server.address), until)


def test_a_stolen_routing_id_gets_nothing_and_disturbs_nobody(make_server, make_client, until, keys):
    """A valid key of another policy connects with the victim's name as its whole routing id."""
    server = make_server()
    victim = make_client(server.address)
    assert is_served(server, victim, until)
    context = zmq.Context()
    try:
        thief = raw_dealer(context, server, load_client_keys(keys.folder, Grant("worker", "llama")), identity=WORKER)
        thief.send(b"trust me")
        assert refused(server, until, "impersonation") == []
        assert server.send(WORKER, b"for the victim")
        assert until(lambda: victim.receive(0.05)) == [b"for the victim"]
        assert thief.poll(0) == 0
        assert is_served(server, victim, until)
    finally:
        context.destroy(linger=0)


def test_a_role_that_the_server_does_not_serve_is_refused(make_server, make_client, until):
    """A learner's intake takes workers of its own policy only."""
    server = make_server(admits=lambda grant: grant == QWEN)
    stranger = make_client(server.address, "worker/llama/0")
    assert refused(server, until, "role") == []
    assert stranger.send(b"hello") is False
    assert is_served(server, make_client(server.address), until)


def raw_dealer(context, server, keys=None, *, identity=b"", plain=False):
    """A DEALER with whatever security is asked for."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    if identity:
        dealer.setsockopt(zmq.IDENTITY, identity)
    if keys:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    if plain:
        dealer.setsockopt(zmq.PLAIN_USERNAME, b"admin")
        dealer.setsockopt(zmq.PLAIN_PASSWORD, b"admin")
    dealer.connect(server.address)
    return dealer


@pytest.mark.parametrize("plain", [False, True], ids=["NULL", "PLAIN"])
def test_a_client_without_curve_gets_nothing(make_server, until, plain):
    """It is refused at the handshake: it can neither send nor receive."""
    server = make_server()
    context = zmq.Context()
    try:
        dealer = raw_dealer(context, server, identity=WORKER, plain=plain)
        dealer.send(b"let me in")
        assert refused(server, until, "handshake") == []
        assert server.send(WORKER, b"secret") is False
        assert dealer.poll(0) == 0
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 100, os.urandom(5000), b"\xff" + bytes(9) + b"\x7f\x03"]
)
def test_garbage_bytes_leave_the_server_working(make_server, make_client, until, garbage):
    """A TCP client that speaks no ZeroMQ is cut off, others are served."""
    server = make_server(handshake_s=0.3)
    with socket.create_connection(("127.0.0.1", port_of(server.address))) as raw:
        raw.settimeout(10)
        raw.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    assert server.receive(0.0) == []
    assert is_served(server, make_client(server.address), until)


def test_slow_handshakes_end_and_keep_nobody_out(make_server, make_client, until):
    """Fifty connections that never finish their greeting are closed by the server while others are served."""
    server = make_server(handshake_s=0.5)
    with contextlib.ExitStack() as closing:
        slow = [
            closing.enter_context(socket.create_connection(("127.0.0.1", port_of(server.address)))) for _ in range(50)
        ]
        for raw in slow:
            raw.settimeout(10)
            raw.sendall(b"\xff" + bytes(8))
        assert is_served(server, make_client(server.address), until)
        for raw in slow:
            with contextlib.suppress(ConnectionResetError):
                while raw.recv(4096):
                    pass
    assert is_served(server, make_client(server.address, "worker/qwen/1"), until)


@pytest.mark.system
def test_two_hundred_clients_reconnect(make_server, make_client, until):
    """Each is heard on its first link and again on its second, under its own name."""
    server = make_server()
    clients = [make_client(server.address, f"worker/qwen/{number}") for number in range(200)]
    names = {f"worker/qwen/{number}".encode() for number in range(200)}

    def all_heard(body):
        waiting, heard = list(clients), set()

        def round_of_sends():
            waiting[:] = [client for client in waiting if not client.send(body)]
            heard.update(message.client for message in server.receive(0.02) if message.body == body)
            return heard == names

        return until(round_of_sends)

    assert all_heard(b"first")
    for client in clients:
        client.reconnect()
    assert all_heard(b"second")
    assert all(server.send(name, b"welcome") for name in names)
    assert all(until(lambda client=client: client.receive(0.05)) == [b"welcome"] for client in clients)


def test_a_peer_that_vanished_without_a_word_gives_its_routing_id_back(make_server, until, keys):
    """A connection over a half-open link takes over the routing id of the dead one, and its answers reach it."""
    server = make_server()
    own = load_client_keys(keys.folder, QWEN)
    contexts = [zmq.Context(), zmq.Context()]
    try:
        dealers = []
        for context in contexts:  # the first stays open: to the server it is alive until its heartbeat is missed
            dealers.append(raw_dealer(context, server, own, identity=WORKER + b"\0" + bytes(16)))
            dealers[-1].send(b"here I am")
            [incoming] = until(lambda: server.receive(0.05))
            assert server.send(incoming.client, b"welcome")
            assert dealers[-1].poll(5000)
            assert dealers[-1].recv() == b"welcome"
    finally:
        for context in contexts:
            context.destroy(linger=0)


def test_the_key_of_a_copied_file_works_elsewhere(make_server, make_client, until, keys, tmp_path):
    """One file is all that a client on another host needs."""
    folder = tmp_path / "elsewhere"
    folder.mkdir(mode=0o700)
    copy = client_file(folder, QWEN)
    copy.write_bytes(client_file(keys.folder, QWEN).read_bytes())
    copy.chmod(0o600)
    server = make_server()
    assert is_served(server, make_client(server.address, with_keys=load_client_keys(folder, QWEN)), until)
