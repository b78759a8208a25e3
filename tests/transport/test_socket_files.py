"""Links over socket files: the same keys, for this host alone."""

import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys, load_client_keys, revoke_client_key

QWEN = Grant("worker", "qwen")


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket file's path that is short enough wherever pytest keeps its folders."""
    with tempfile.TemporaryDirectory(prefix="mrl-") as folder:
        yield Path(folder) / "ipc" / "exchange"


def greet(server, client, until):
    """A body there and an answer back."""
    until(lambda: client.send(b"hello") or client.wait(0.02))
    [incoming] = until(lambda: server.receive(0.05))
    assert server.send(incoming.client, b"welcome")
    assert until(lambda: client.receive(0.05)) == [b"welcome"]
    return incoming


def test_messages_pass_over_tcp_and_over_the_file(make_server, make_client, until, path):
    """One socket serves both, and the file is its owner's alone."""
    server = make_server(ipc_path=path)
    assert greet(server, make_client(f"ipc://{server.ipc_path}"), until).client == b"worker/qwen/0"
    assert greet(server, make_client(server.address, "worker/qwen/1"), until).client == b"worker/qwen/1"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_keys_count_on_the_file_too(make_server, make_client, until, path, keys, tmp_path):
    """Neither a stranger's key nor a client without one gets in, and a revoked key loses its link."""
    server = make_server(ipc_path=path)
    foreign = load_client_keys(create_keys(tmp_path / "other" / "keys", [QWEN]).folder, QWEN)
    own = load_client_keys(keys.folder, QWEN)
    make_client(f"ipc://{path}", with_keys=type(own)(own.server_public, foreign.public, foreign.secret))
    until(lambda: server.receive(0.02) or server.refusals.count("unknown_key"))
    context = zmq.Context()
    try:
        plain = context.socket(zmq.DEALER)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(f"ipc://{path}")
        plain.send(b"let me in")
        until(lambda: server.receive(0.02) or server.refusals.count("handshake"))
    finally:
        context.destroy(linger=0)
    client = make_client(f"ipc://{path}")
    greet(server, client, until)
    revoke_client_key(keys.folder, "worker/qwen")
    end_s = time.monotonic() + 2.0
    while client.send(b"still here"):
        assert time.monotonic() < end_s
        server.receive(0.02)
    while server.send(b"worker/qwen/0", b"secret"):  # the client may have seen the end of the link first
        assert time.monotonic() < end_s
        server.receive(0.02)


def test_a_path_that_is_too_long_leaves_tcp(make_server, make_client, until, path):
    """That is counted, not raised."""
    server = make_server(ipc_path=path.parent / ("x" * 107))
    assert (server.ipc_path, server.refusals.counts()) == (None, {"ipc_path": 1})
    greet(server, make_client(server.address), until)


def test_a_file_that_a_dead_server_left_is_taken_over(make_server, make_client, until, path):
    """And one that ended in order leaves none."""
    path.parent.mkdir()
    path.touch()
    server = make_server(ipc_path=path)
    greet(server, make_client(f"ipc://{path}"), until)
    server.close()
    assert not path.exists()
