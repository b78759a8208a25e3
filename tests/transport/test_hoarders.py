"""Who sends more than is read, over real encrypted sockets: found, named and cut, and nobody else is."""

import pytest
from structlog.testing import capture_logs

from mrl.transport.allow_list import fingerprint
from mrl.transport.grants import Grant
from mrl.transport.hoarders import LOOK_S, LOOK_SOON_S, MIN_HOARD_BYTES, Hoarders, _bytes_of_connection
from mrl.transport.keys import load_client_keys
from mrl.transport.server import _cut

MIB = 1024 * 1024
QWEN = Grant("worker", "qwen")


def greet(server, client, until):
    """The server knows the connection from then on."""
    until(lambda: client.send(b"hello") or client.wait(0.02))
    until(lambda: server.receive(0.05))


def throw_bomb(client, hoarders, num_bytes, until):
    """One message of many frames, of which the server reads nothing before all have come."""
    before_bytes = unread_bytes(hoarders)
    client._socket.send_multipart([bytes(MIB)] * (num_bytes // MIB))
    until(lambda: unread_bytes(hoarders) >= before_bytes + num_bytes)


def unread_bytes(hoarders):
    """Of all connections that have much."""
    return sum(one.unread_bytes for one in hoarders._unread())


def test_a_message_without_end_is_cut_and_its_key_named(make_server, make_client, until, keys):
    """Others are heard as before."""
    hoarders = Hoarders(max_unread_bytes=8 * MIB)
    server = make_server(hoarders=hoarders)
    bomber, other = make_client(server.address), make_client(server.address, "worker/llama/0")
    greet(server, bomber, until)
    greet(server, other, until)
    throw_bomb(bomber, hoarders, 12 * MIB, until)
    server._look_s = 0.0  # the message is complete by now: it must be looked at before it is read
    with capture_logs() as lines:
        until(lambda: server.receive(0.02) or server.refusals.count("unread"))
    [line] = [line for line in lines if line["reason"] == "unread"]
    own = load_client_keys(keys.folder, QWEN)
    assert (line["who"], line["name"]) == (fingerprint(own.public.decode()), "worker/qwen")
    assert line["unread_bytes"] >= 12 * MIB
    until(lambda: server.receive(0.02) or not bomber.send(b"still there?"))
    greet(server, other, until)


def test_all_together_may_have_so_much_unread_and_the_greatest_goes(make_server, make_client, until):
    """None of them is too much alone."""
    hoarders = Hoarders(max_unread_bytes=64 * MIB, max_total_unread_bytes=12 * MIB)
    server = make_server(hoarders=hoarders)
    small, large = make_client(server.address), make_client(server.address, "worker/llama/0")
    greet(server, small, until)
    greet(server, large, until)
    throw_bomb(small, hoarders, 3 * MIB, until)
    throw_bomb(large, hoarders, 11 * MIB, until)
    assert [one.link.grant.name for one in hoarders.take()] == ["worker/llama"]
    assert hoarders.take() == []


def test_a_client_that_comes_back_is_looked_at_again(make_server, make_client, until):
    """Its routing id is known, its connection is another one."""
    hoarders = Hoarders(max_unread_bytes=8 * MIB)
    server = make_server(hoarders=hoarders)
    client = make_client(server.address)
    greet(server, client, until)
    [before] = hoarders._accounts
    _cut(before)

    def is_back():
        client.send(b"hello again")
        client.wait(0.02)
        return server.receive(0.02) and any(connection != before for connection in hoarders._accounts)

    until(is_back)
    throw_bomb(client, hoarders, 12 * MIB, until)
    server._look_s = 0.0
    until(lambda: server.receive(0.02) or server.refusals.count("unread"))


def test_the_more_is_unread_the_sooner_one_looks_again(make_server, make_client, until):
    """And as rarely as before when it has been read."""
    hoarders = Hoarders(max_unread_bytes=64 * MIB, max_total_unread_bytes=16 * MIB)
    server = make_server(hoarders=hoarders)
    client = make_client(server.address)
    greet(server, client, until)
    throw_bomb(client, hoarders, 5 * MIB, until)
    assert hoarders.take() == []
    assert hoarders.look_every_s == LOOK_SOON_S
    until(lambda: server.receive(0.02) or hoarders.look_every_s == LOOK_S)


@pytest.mark.parametrize("num_bytes", [0, 1, 222, 223, 300_000])
def test_what_is_read_is_counted_as_it_came(make_server, make_client, until, num_bytes):
    """Otherwise an honest connection looks worse, or another one better, the longer it lives."""
    hoarders = Hoarders()
    server = make_server(hoarders=hoarders)
    client = make_client(server.address)
    greet(server, client, until)
    [((descriptor, _), account)] = hoarders._accounts.items()
    handshake_bytes = _bytes_of_connection(descriptor) - account.read_bytes
    for _ in range(20):
        assert client.send(bytes(num_bytes))
        until(lambda: server.receive(0.05))
    assert _bytes_of_connection(descriptor) - account.read_bytes == handshake_bytes < 1000


def test_connections_that_ended_are_forgotten(make_server, make_client, until):
    """Otherwise looking takes longer with every one that ever was."""
    hoarders = Hoarders()
    server = make_server(hoarders=hoarders)
    client = make_client(server.address)
    greet(server, client, until)
    assert len(hoarders) == 1
    client.close()
    until(lambda: server.receive(0.06) or len(hoarders) == 0)


def test_a_socket_file_is_not_looked_at(make_server, make_client, until, tmp_path):
    """The kernel does not count there; nobody is cut for that."""
    hoarders = Hoarders(max_unread_bytes=0, max_total_unread_bytes=0)
    server = make_server(hoarders=hoarders, ipc_path=tmp_path / "s")
    client = make_client(f"ipc://{tmp_path / 's'}")
    greet(server, client, until)
    assert client.send(bytes(3 * MIN_HOARD_BYTES))
    until(lambda: server.receive(0.06))
    server.receive(0.06)
    assert hoarders.take() == []
    assert server.refusals.counts() == {}
