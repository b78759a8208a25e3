"""What waits to be sent, in bytes; with real sockets: a client that reads nothing, beside one that does."""

import pytest

from mrl.transport import server as server_module
from mrl.transport.unsent import Unsent

KIB = 1024


class Message:
    """A tracker that the test decides on."""

    def __init__(self):
        self.done = False


@pytest.mark.parametrize(
    ("own", "other", "num_bytes", "admitted"),
    [
        ([], [], 10_000, True),
        ([], [900] * 3, 10_000, True),
        ([400], [], 600, True),
        ([400], [], 601, False),
        ([100], [900, 400], 100, True),
        ([100], [900, 400], 101, False),
    ],
    ids=["one is always allowed", "also when others have all", "own", "too much", "total", "too much in all"],
)
def test_bounds_of_each_and_of_all(own, other, num_bytes, admitted):
    """The last byte that fits, and the first that does not."""
    unsent = Unsent(max_bytes=1000, max_total_bytes=1500)
    for client, sizes in ((b"own", own), (b"other", other)):
        for size in sizes:
            unsent.note(client, size, Message())
    assert unsent.admits(b"own", num_bytes) is admitted


def test_what_was_sent_counts_no_longer():
    """Of this client and of others; what lies behind a message that waits still waits."""
    unsent = Unsent(max_bytes=1000, max_total_bytes=1500)
    first, second, other = Message(), Message(), Message()
    unsent.note(b"a", 600, first)
    unsent.note(b"a", 300, second)
    unsent.note(b"b", 500, other)
    second.done = True
    assert not unsent.admits(b"a", 200)
    other.done = True
    assert not unsent.admits(b"a", 200)
    assert unsent.admits(b"a", 100)
    first.done = True
    assert unsent.admits(b"a", 1000)
    assert unsent.total_bytes == 0


@pytest.mark.parametrize("is_file", [False, True], ids=["tcp", "socket file"])
def test_a_client_that_reads_nothing_holds_little(make_server, make_client, until, tmp_path, is_file):
    """It is refused what is too much; another one gets all of its own."""
    server = make_server(ipc_path=tmp_path / "s")
    address = f"ipc://{tmp_path / 's'}" if is_file else server.address
    deaf, other = make_client(address), make_client(address, "worker/llama/0")
    for client in (deaf, other):
        until(lambda client=client: client.send(b"hello") or client.wait(0.02))
        until(lambda: server.receive(0.05))
    sent = sum(server.send(b"worker/qwen/0", bytes(512 * KIB)) for _ in range(60))
    assert 512 * KIB * sent < 20 * 1024 * KIB  # what may wait here, and what the kernel and the client's socket take
    assert server._unsent.total_bytes <= 8 * 1024 * KIB
    for number in range(20):
        assert server.send(b"worker/llama/0", bytes([number]) * 512 * KIB)
        assert until(lambda: other.receive(0.05))[0][:1] == bytes([number])


def test_short_messages_are_not_tracked(make_server, make_client, until, monkeypatch):
    """They are copied, which costs less."""
    monkeypatch.setattr(server_module, "MIN_TRACKED_BYTES", 1000)
    server = make_server()
    client = make_client(server.address)
    until(lambda: client.send(b"hello") or client.wait(0.02))
    until(lambda: server.receive(0.05))
    noted = []
    monkeypatch.setattr(server._unsent, "note", lambda *told: noted.append(told[1]))
    for num_bytes in (999, 1000):
        assert server.send(b"worker/qwen/0", bytes(num_bytes))
        assert len(until(lambda: client.receive(0.05))[0]) == num_bytes
    assert noted == [1000]
