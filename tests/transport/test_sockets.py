"""Server and client over real encrypted loopback sockets."""

import contextlib
import os
import socket

import pytest
import zmq

from mrl.errors import AddressError
from mrl.transport.client import ClientSocket
from mrl.transport.endpoints import port_of
from mrl.transport.keys import RunKeys, create_keys
from mrl.transport.server import ServerSocket


def exchange_one(server, client, until, body=b"hello"):
    """Send one body to the server and echo it back; returns (identity, body, answer)."""
    until(lambda: client.send(body) or client.wait(0.02))
    [(identity, received)] = until(lambda: server.receive(0.05))
    assert server.send(identity, received[::-1])
    [answer] = until(lambda: client.receive(0.05))
    return identity, received, answer


def test_a_message_goes_there_and_back(make_server, make_client, until):
    """The server learns who wrote, and the client gets the answer."""
    server = make_server()
    client = make_client(server.address, identity="worker/a/0")
    assert exchange_one(server, client, until) == (b"worker/a/0", b"hello", b"olleh")


def refused(server, until):
    """Wait until a connection was refused; whatever is received meanwhile is returned."""
    received = []

    def look():
        received.extend(server.receive(0.05))
        return server.refused_handshakes

    until(look)
    return received


@pytest.mark.parametrize("wrong", ["client", "server"])
def test_a_wrong_key_is_refused(make_server, make_client, until, keys, tmp_path, wrong):
    """Neither a client with an unknown key nor one that expects another server gets a message through."""
    other = create_keys(tmp_path)
    if wrong == "client":
        bad = RunKeys(keys.server_public, keys.server_secret, other.client_public, other.client_secret)
    else:
        bad = RunKeys(other.server_public, other.server_secret, keys.client_public, keys.client_secret)
    server = make_server()
    client = make_client(server.address, keys=bad)
    assert refused(server, until) == []
    assert client.send(b"let me in") is False


def test_a_client_without_curve_gets_nothing(make_server, opened, until):
    """A plain ZeroMQ client is refused at the handshake: it can neither send nor receive."""
    server = make_server()
    context = zmq.Context()
    try:
        plain = context.socket(zmq.DEALER)
        plain.setsockopt(zmq.LINGER, 0)
        plain.setsockopt(zmq.IDENTITY, b"intruder")
        plain.connect(server.address)
        plain.send(b"let me in")
        assert refused(server, until) == []
        assert server.send(b"intruder", b"secret") is False
        assert plain.poll(0) == 0
    finally:
        context.destroy(linger=0)


def test_garbage_bytes_leave_the_server_working(make_server, make_client, until):
    """A TCP client that speaks no ZeroMQ is cut off, others are served."""
    server = make_server()
    with socket.create_connection(("127.0.0.1", port_of(server.address))) as raw:
        raw.settimeout(10)
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    assert server.receive(0.0) == []
    exchange_one(server, make_client(server.address), until)


def test_oversize_is_dropped_on_both_sides(make_server, make_client, until):
    """The client refuses to send too much; when it does send, the server drops it and serves the next message."""
    server = make_server(max_message_bytes=1000)
    careful = make_client(server.address, max_message_bytes=1000)
    assert careful.send(b"x" * 1001) is False
    assert careful.oversize == 1
    careless = make_client(server.address, identity="careless")
    until(lambda: careless.send(b"x" * 1001) or careless.wait(0.02))
    until(lambda: careless.send(b"small") or careless.wait(0.02))
    received = []

    def small_came():
        received.extend(server.receive(0.05))
        return (b"careless", b"small") in received or (careless.send(b"small") and False)

    until(small_came)
    assert max(len(body) for _, body in received) == 5


def test_other_frame_counts_are_dropped_and_counted(make_server, keys, until):
    """A message of two body frames is no message."""
    server = make_server()
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        for option, value in ((zmq.CURVE_SERVERKEY, keys.server_public), (zmq.CURVE_PUBLICKEY, keys.client_public)):
            dealer.setsockopt(option, value)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
        dealer.connect(server.address)
        dealer.send_multipart([b"two", b"frames"])
        dealer.send(b"one frame")
        [(_, body)] = until(lambda: server.receive(0.05))
        assert (body, server.malformed) == (b"one frame", 1)
    finally:
        context.destroy(linger=0)


def test_sending_to_a_stranger_returns_false(make_server):
    """The server says so instead of dropping silently."""
    assert make_server().send(b"nobody", b"hello") is False


def test_a_full_client_never_blocks_the_server(make_server, make_client, until):
    """Sends to a client that does not read turn False instead of waiting."""
    server = make_server()
    client = make_client(server.address)
    until(lambda: client.send(b"here") or client.wait(0.02))
    [(identity, _)] = until(lambda: server.receive(0.05))
    assert not all(server.send(identity, bytes(200_000)) for _ in range(2000))


def test_a_client_follows_a_server_that_moved(make_server, make_client, until):
    """After `reconnect` the address is looked up anew, and the identity is taken over."""
    addresses = [None]
    client = make_client(lambda: addresses[-1])
    assert client.send(b"too early") is False
    first = make_server()
    addresses.append(first.address)
    exchange_one(first, client, until)
    second = make_server()
    addresses.append(second.address)
    client.reconnect()
    assert exchange_one(second, client, until) == (b"client", b"hello", b"olleh")


def test_a_second_link_takes_over_the_identity(make_server, make_client, until):
    """A client that comes back over a new link is heard although its old link still stands."""
    server = make_server()
    exchange_one(server, make_client(server.address), until)
    assert exchange_one(server, make_client(server.address), until, b"again")[1] == b"again"


def test_a_busy_port_is_one_clear_line(make_server):
    """The person learns which port, and what to change."""
    port = port_of(make_server().address)
    with pytest.raises(AddressError, match=rf"127\.0\.0\.1:{port}.*busy.*cure: set another port"):
        make_server(port=port)


def test_an_address_of_no_local_interface_is_refused(make_server):
    """A host that is not this machine cannot be bound."""
    with pytest.raises(AddressError, match=r"198\.51\.100\.7"):
        make_server(host="198.51.100.7")


def test_sockets_leave_no_descriptor_behind(keys):
    """Opening and closing servers and clients repeatedly does not leak."""

    def open_and_close():
        server = ServerSocket(keys)
        client = ClientSocket(keys, lambda: server.address, identity="c")
        client.close()
        server.close()
        return len(os.listdir("/proc/self/fd"))

    open_and_close()
    assert open_and_close() <= open_and_close()
