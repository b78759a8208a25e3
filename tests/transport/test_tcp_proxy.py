"""The TCP port of a server: what passes through it, and what a crowd of strangers cannot do."""

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys

import pytest

from mrl.errors import RoleFailed
from mrl.transport.endpoints import port_of, read_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import ClientKeys, create_keys, load_client_keys
from mrl.transport.tcp_proxy import DESCRIPTORS_EACH, TcpProxy, most_connections

GREETING = b"\xff" + bytes(8) + b"\x7f"
CROWD = 1100
QWEN = Grant("worker", "qwen")


def exchange(server, client, until, body=b"hello") -> bytes:
    """A body there and its reverse back."""
    until(lambda: client.send(body) or client.wait(0.02))
    [incoming] = until(lambda: server.receive(0.05))
    assert server.send(incoming.client, incoming.body[::-1])
    [answer] = until(lambda: client.receive(0.05))
    return answer


def test_long_messages_pass_whole_both_ways(make_server, make_client, until):
    """Far longer than what is read at once, while the other side takes its time."""
    server = make_server()
    body = os.urandom(6 * 1024 * 1024)
    assert exchange(server, make_client(server.address), until, body) == body[::-1]


@pytest.mark.parametrize("says", [b"", GREETING])
def test_a_crowd_neither_takes_the_descriptors_nor_keeps_anybody_out(make_server, make_client, until, says):
    """Connections beyond the bound are ended, strangers first; who was let in stays, and who has a key gets in."""
    server = make_server(max_connections=20)
    old = make_client(server.address)
    assert exchange(server, old, until) == b"olleh"
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as closing:
        for _ in range(200):
            raw = closing.enter_context(socket.create_connection(("127.0.0.1", port_of(server.address))))
            with contextlib.suppress(OSError):  # ended already
                raw.sendall(says)
        until(lambda: server.receive(0.01) or server.refusals.counts().get("crowd", 0) > 150)
        assert len(os.listdir("/proc/self/fd")) <= before + 200 + 20 * DESCRIPTORS_EACH
        assert exchange(server, old, until, b"still") == b"llits"
        assert exchange(server, make_client(server.address, "worker/qwen/1"), until, b"new") == b"wen"
    assert server.refusals.counts().get("full", 0) == 0


def test_a_table_full_of_friends_refuses_the_next(make_server, make_client, until):
    """And takes it once one of them has left."""
    server = make_server(max_connections=2)
    friends = [make_client(server.address, f"worker/qwen/{number}") for number in range(2)]
    for friend in friends:
        assert exchange(server, friend, until) == b"olleh"
    late = make_client(server.address, "worker/qwen/2")
    until(lambda: server.receive(0.01) or server.refusals.counts().get("full", 0))
    assert not late.send(b"hello")
    friends[0].close()
    assert exchange(server, late, until) == b"olleh"


class Noted(set):
    """Remembers all that was ever added."""

    def __init__(self) -> None:
        self.ever: list = []

    def add(self, item) -> None:
        self.ever.append(item)
        super().add(item)


def test_a_key_that_is_refused_stays_a_stranger(make_server, make_client, until, keys, tmp_path):
    """Such a client hears more of the server than others do, but not as much as one that is let in."""
    server = make_server(admits=lambda grant: grant.policy == "qwen")
    server._front._known = known = Noted()
    make_client(server.address, "worker/llama/0", with_keys=load_client_keys(keys.folder, Grant("worker", "llama")))
    foreign = load_client_keys(create_keys(tmp_path / "other" / "keys", [QWEN]).folder, QWEN)
    unknown = ClientKeys(keys.server_public, foreign.public, foreign.secret)
    make_client(server.address, "worker/qwen/1", with_keys=unknown)
    for reason in ("role", "unknown_key"):
        until(lambda reason=reason: server.receive(0.01) or server.refusals.counts().get(reason, 0))
    until(lambda: server.receive(0.01) or not (server._front._strangers or known))  # the server has ended both
    assert known.ever == []
    assert exchange(server, make_client(server.address), until) == b"olleh"
    assert len(known.ever) == 1


def test_the_busiest_address_gives_way(tmp_path, until):
    """A crowd from one address does not displace a stranger from another."""
    with socket.socket(socket.AF_UNIX) as behind, contextlib.ExitStack() as closing:
        behind.bind(str(tmp_path / "s"))
        behind.listen(64)
        front = TcpProxy("127.0.0.1", 0, tmp_path / "s", refused=lambda *_: None, max_connections=6)
        closing.callback(front.close)
        lone = closing.enter_context(
            socket.create_connection(("127.0.0.1", front.port), source_address=("127.0.0.2", 0))
        )
        crowd = [closing.enter_context(socket.create_connection(("127.0.0.1", front.port))) for _ in range(30)]
        crowd[0].settimeout(10)
        assert crowd[0].recv(1) == b""  # the oldest of them went
        lone.sendall(b"x")
        inner, _ = behind.accept()
        with inner:
            inner.settimeout(10)
            assert inner.recv(1) == b"x"


def test_a_connection_without_a_descriptor_for_it_costs_itself_alone(make_server, make_client, until, monkeypatch):
    """The one who came is refused; the port goes on."""
    server = make_server()
    real, failed = socket.socket, []

    def lacking(family=-1, *arguments, **named):
        if family == socket.AF_UNIX and not failed:
            failed.append(family)
            raise OSError(errno.EMFILE, "Too many open files")
        return real(family, *arguments, **named)

    monkeypatch.setattr("mrl.transport.tcp_proxy.socket.socket", lacking)
    with real(socket.AF_INET, socket.SOCK_STREAM) as raw:
        raw.settimeout(60.0)
        raw.connect(("127.0.0.1", port_of(server.address)))
        assert raw.recv(1) == b""
    assert failed
    assert exchange(server, make_client(server.address), until) == b"olleh"


def test_a_port_that_nobody_listens_at_any_more_is_noticed(make_server, until, monkeypatch):
    """The server's own thread hears of it, with the cause, and does not wait for clients that cannot come."""
    server = make_server(host="127.0.0.1")

    def fail(self):
        raise KeyError("a mistake in the thread")

    monkeypatch.setattr(TcpProxy, "_take", fail)
    with socket.create_connection(("127.0.0.1", server._front.port)):
        until(lambda: server._front.failure is not None)
    with pytest.raises(RoleFailed, match=r"the listener at tcp://127\.0\.0\.1:\d+ has stopped") as failed:
        server.receive(0.0)
    assert isinstance(failed.value.__cause__, KeyError)


def test_half_of_the_descriptors_are_left_to_the_files():
    """Whatever the limit is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit in (64, 1024):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert 0 < most_connections() * DESCRIPTORS_EACH <= limit // 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FLOODED = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from pathlib import Path
from mrl.transport.endpoints import publish_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import load_keys
from mrl.transport.server import ServerSocket
folder = Path(sys.argv[1])
server = ServerSocket(load_keys(folder / "keys"), host="127.0.0.1")
publish_endpoint(folder, "flooded", server.address)
while True:
    for client, body, _ in server.receive(0.05):
        with open(folder / "file", "wb") as file:  # needs a descriptor
            file.write(body)
        server.send(client, body[::-1])
"""


def test_eleven_hundred_connections_to_a_process_of_1024_descriptors(tmp_path, keys, make_client, until):
    """It goes on opening files and answering while they stand, old clients and new ones."""
    with subprocess.Popen([sys.executable, "-c", FLOODED, str(tmp_path)]) as child:
        try:
            address = until(lambda: read_endpoint(tmp_path, "flooded"))
            old = make_client(address)
            until(lambda: old.send(b"hello") or old.wait(0.02))
            assert until(lambda: old.receive(0.05)) == [b"olleh"]
            with contextlib.ExitStack() as closing:
                for _ in range(CROWD):
                    raw = closing.enter_context(socket.socket())
                    raw.setblocking(False)
                    raw.connect_ex(("127.0.0.1", port_of(address)))
                for client in (old, make_client(address, "worker/qwen/1")):
                    until(lambda client=client: client.send(b"again") or client.wait(0.02))
                    assert until(lambda client=client: client.receive(0.05)) == [b"niaga"]
                assert len(os.listdir(f"/proc/{child.pid}/fd")) < 700
            assert child.poll() is None
        finally:
            child.kill()
