"""Server and client over real encrypted loopback sockets: messages, bounds, addresses."""

import os

import pytest
import zmq

from mrl.errors import AddressError
from mrl.transport.client_socket import ClientSocket
from mrl.transport.endpoints import port_of
from mrl.transport.grants import Grant
from mrl.transport.keys import load_client_keys
from mrl.transport.server import Incoming, ServerSocket

WORKER = b"worker/qwen/0"


def exchange_one(server, client, until, body=b"hello"):
    """Send one body to the server and echo it back; returns (what came, the answer)."""
    until(lambda: client.send(body) or client.wait(0.02))
    [incoming] = until(lambda: server.receive(0.05))
    assert server.send(incoming.client, incoming.body[::-1])
    [answer] = until(lambda: client.receive(0.05))
    return incoming, answer


def test_a_message_goes_there_and_back(make_server, make_client, until):
    """The server learns who wrote and what that key may be, and the client gets the answer."""
    server = make_server()
    incoming, answer = exchange_one(server, make_client(server.address), until)
    assert incoming == Incoming(WORKER, b"hello", Grant("worker", "qwen"))
    assert answer == b"olleh"
    assert server.refusals.counts() == {}


def test_oversize_is_dropped_on_both_sides(make_server, make_client, until):
    """The client refuses to send too much; when it does send, the server drops it and serves the next message."""
    server = make_server(max_message_bytes=1000)
    careful = make_client(server.address, max_message_bytes=1000)
    until(lambda: careful.send(b"x") or careful.wait(0.02))
    assert careful.send(b"x" * 1001) is False
    assert careful.send(b"x" * 1000) is True
    careless = make_client(server.address, identity="worker/qwen/1")
    until(lambda: careless.send(b"x" * 1001) or careless.wait(0.02))
    until(lambda: careless.send(b"small") or careless.wait(0.02))
    received = []

    def small_came():
        received.extend((message.client, message.body) for message in server.receive(0.05))
        return (b"worker/qwen/1", b"small") in received or (careless.send(b"small") and False)

    until(small_came)
    assert max(len(body) for client, body in received if client == b"worker/qwen/1") == 5


def test_other_frame_counts_are_dropped_and_counted(make_server, make_client, until):
    """A message of two body frames is no message."""
    server = make_server()
    client = make_client(server.address)
    until(lambda: client.send(b"one frame") or client.wait(0.02))
    client._socket.send_multipart([b"two", b"frames"])
    until(lambda: client.send(b"one frame") or client.wait(0.02))
    bodies = []
    until(lambda: bodies.extend(message.body for message in server.receive(0.05)) or len(bodies) == 2)
    assert (bodies, server.refusals.counts().get("frames", 0)) == ([b"one frame"] * 2, 1)


def test_sending_to_a_stranger_returns_false(make_server):
    """The server says so instead of dropping silently."""
    assert make_server().send(b"worker/qwen/7", b"hello") is False


def test_sending_to_a_client_that_left_returns_false(make_server, make_client, until):
    """Once its link is known to be gone, nothing is queued for it and nothing is raised."""
    server = make_server()
    client = make_client(server.address)
    exchange_one(server, client, until)
    client.close()
    until(lambda: server.receive(0.02) or not server.send(WORKER, b"anybody there?"))


def test_a_full_client_never_blocks_the_server(make_server, make_client, until):
    """Sends to a client that does not read turn False instead of waiting."""
    server = make_server()
    client = make_client(server.address)
    until(lambda: client.send(b"here") or client.wait(0.02))
    [incoming] = until(lambda: server.receive(0.05))
    assert not all(server.send(incoming.client, bytes(200_000)) for _ in range(2000))


def test_a_client_follows_a_server_that_moved(make_server, make_client, until):
    """After `reconnect` the address is looked up anew."""
    addresses = [None]
    client = make_client(lambda: addresses[-1])
    assert client.send(b"too early") is False
    first = make_server()
    addresses.append(first.address)
    exchange_one(first, client, until)
    second = make_server()
    addresses.append(second.address)
    client.reconnect()
    assert exchange_one(second, client, until)[0].client == WORKER


def test_answers_go_to_the_newest_link_of_a_client(make_server, make_client, until):
    """A client that comes back while its old link still stands is heard, and the old link gets nothing more."""
    server = make_server()
    old = make_client(server.address)
    exchange_one(server, old, until)
    new = make_client(server.address)
    assert exchange_one(server, new, until, b"again")[1] == b"niaga"
    until(lambda: old.send(b"late words") or old.wait(0.02))
    until(lambda: server.receive(0.05))
    assert server.send(WORKER, b"for the new one")
    assert until(lambda: new.receive(0.05)) == [b"for the new one"]
    assert old.receive(0.0) == []


def test_a_busy_port_is_one_clear_line(make_server):
    """The person learns which port, and what to change."""
    port = port_of(make_server().address)
    with pytest.raises(
        AddressError, match=rf"127\.0\.0\.1:{port}: .*the port is already in use; cure: set another port"
    ):
        make_server(port=port)


def test_an_address_of_no_local_interface_is_refused(make_server):
    """A host that is not this machine cannot be bound."""
    with pytest.raises(AddressError, match=r"198\.51\.100\.7"):
        make_server(host="198.51.100.7")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_every_bound_socket_has_curve(make_server, host):
    """Whether it listens on loopback or beyond."""
    socket = make_server(host=host)._socket
    assert (socket.get(zmq.MECHANISM), socket.get(zmq.CURVE_SERVER)) == (zmq.CURVE, 1)


def test_sockets_leave_no_descriptor_behind(keys, until):
    """Forty rounds of opening and closing leave fewer than one each; some are closed a little later, by a thread."""
    client_keys = load_client_keys(keys.folder, Grant("worker", "qwen"))

    def open_and_close():
        server = ServerSocket(keys)
        client = ClientSocket(client_keys, lambda: server.address, identity="worker/qwen/0")
        client.close()
        server.close()

    open_and_close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        open_and_close()
    until(lambda: len(os.listdir("/proc/self/fd")) < before + 20)
