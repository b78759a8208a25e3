"""Links over socket files: the same keys, for this host alone."""

import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from mrl.errors import AddressError
from mrl.transport.endpoints import port_of
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
    until(lambda: server.receive(0.02) or server.refusals.counts().get("unknown_key", 0))
    context = zmq.Context()
    try:
        plain = context.socket(zmq.DEALER)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(f"ipc://{path}")
        plain.send(b"let me in")
        until(lambda: server.receive(0.02) or server.refusals.counts().get("handshake", 0))
    finally:
        context.destroy(linger=0)
    client = make_client(f"ipc://{path}")
    greet(server, client, until)
    revoke_client_key(keys.folder, "worker/qwen")
    end_s = time.monotonic() + 120.0
    while client.send(b"still here"):
        assert time.monotonic() < end_s
        server.receive(0.02)
    while server.send(b"worker/qwen/0", b"secret"):  # the client may have seen the end of the link first
        assert time.monotonic() < end_s
        server.receive(0.02)


@pytest.mark.parametrize("is_given", [True, False])
def test_without_a_path_that_can_be_bound_the_file_has_a_folder_of_its_own(make_server, make_client, until, is_given):
    """It is as private, and goes with the server."""
    server = make_server(host="", ipc_path=Path("/tmp") / ("x" * 107) if is_given else None)
    greet(server, make_client(server.address), until)
    assert server.address == f"ipc://{server.ipc_path}"
    assert stat.S_IMODE(server.ipc_path.parent.stat().st_mode) == 0o700
    server.close()
    assert not server.ipc_path.parent.exists()


def test_a_path_that_cannot_be_bound_is_one_clear_line(make_server, path):
    """It names the file and a cure."""
    path.parent.write_text("a file stands where the folder is to be")
    with pytest.raises(AddressError, match=rf"{path}: cannot listen: .*cure: set run.local_folder"):
        make_server(ipc_path=path)


def test_without_a_host_no_tcp_port_is_open(make_server, make_client, until, path):
    """The kernel lists none that this process listens at."""
    before = listening()
    server = make_server(host="", ipc_path=path)
    greet(server, make_client(server.address), until)
    assert listening() == before
    with_port = make_server(host="127.0.0.1")
    assert listening() - before == {port_of(with_port.address)}


def listening() -> set[int]:
    """TCP ports at which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


def test_a_file_that_a_dead_server_left_is_taken_over(make_server, make_client, until, path):
    """And one that ended in order leaves none."""
    path.parent.mkdir()
    path.touch()
    server = make_server(ipc_path=path)
    greet(server, make_client(f"ipc://{path}"), until)
    server.close()
    assert not path.exists()
