"""The thread that owns a client socket."""

import queue
import threading

from mrl.transport.background import BackgroundClient


def start(opened, client, **options):
    """A background client and the queue into which it puts what arrives."""
    inbox = queue.Queue()
    background = BackgroundClient(client, on_message=inbox.put, **options)
    opened.append(_Closer(background))
    return background, inbox


class _Closer:
    def __init__(self, background):
        self._background = background

    def close(self):
        self._background.close(0.0)


def test_posts_arrive_in_order_and_answers_come_back(make_server, make_client, until, opened):
    """What is posted before the link stands is sent when it does."""
    server = make_server()
    background, inbox = start(opened, make_client(server.address))
    assert all(background.post(b"%d" % number) for number in range(100))
    received = []
    until(lambda: received.extend(server.receive(0.05)) or len(received) == 100)
    assert [message.body for message in received] == [b"%d" % number for number in range(100)]
    assert server.send(received[0].client, b"thanks")
    assert inbox.get(timeout=120) == b"thanks"


def test_post_never_waits_and_the_queue_is_bounded(make_client, opened):
    """Without a server the queue fills to its limit; then posts are refused."""
    background, _ = start(opened, make_client(lambda: None), max_queued_bytes=1000)
    assert [background.post(bytes(400)) for _ in range(4)] == [True, True, False, False]


def test_a_message_too_large_is_refused_at_once(make_server, make_client, opened, until):
    """It would otherwise block the head of the queue."""
    server = make_server()
    background, _ = start(opened, make_client(server.address, max_message_bytes=1000))
    assert background.post(bytes(1001)) is False
    assert background.post(b"small") is True
    assert until(lambda: server.receive(0.05))[0].body == b"small"


def test_a_server_that_appears_later_is_found(make_server, make_client, opened, until):
    """The address is looked up again while there is none."""
    addresses = [None]
    background, _ = start(opened, make_client(lambda: addresses[-1]), tick_s=0.01)
    background.post(b"early")
    server = make_server()
    addresses.append(server.address)
    assert until(lambda: server.receive(0.05))[0].body == b"early"


def test_reconnect_on_request_finds_the_new_address(make_server, make_client, opened, until):
    """The caller decides when silence has lasted too long."""
    first, second = make_server(), make_server()
    addresses = [first.address]
    background, _ = start(opened, make_client(lambda: addresses[-1]))
    background.post(b"one")
    until(lambda: first.receive(0.05))
    addresses.append(second.address)
    background.request_reconnect()
    background.post(b"two")
    assert until(lambda: second.receive(0.05))[0].body == b"two"


def test_what_is_posted_after_a_reconnect_request_waits_for_the_new_link(until):
    """Even when both happen in the middle of sending, the message does not go down the old link."""
    calls = []

    class Client:
        max_message_bytes = 100

        def send(self, body):
            calls.append(body)
            if body == b"one":
                background.request_reconnect()
                background.post(b"two")
            return True

        def reconnect(self):
            calls.append("reconnect")

        def wait(self, timeout_s, *, wake_fd, until_sendable):
            pass

        def receive(self, timeout_s):
            return []

        def close(self, linger_s=0.0):
            pass

    background = BackgroundClient(Client(), on_message=lambda body: None)
    background.post(b"one")
    until(lambda: b"two" in calls)
    background.close(0.0)
    assert calls == [b"one", "reconnect", b"two"]


def test_a_restart_drops_what_is_queued_and_keeps_what_is_posted_after_it(make_server, make_client, opened, until):
    """Whoever awaits an answer posts again: a server that comes back is told everything once."""
    addresses = [None]
    background, _ = start(opened, make_client(lambda: addresses[-1]), max_queued_bytes=100)
    for number in range(20):
        assert background.post(b"%050d" % number), "what was dropped takes no room"
        background.restart()
    background.post(b"newest")
    server = make_server()
    addresses.append(server.address)
    assert until(lambda: server.receive(0.05))[0].body == b"newest"


def test_close_sends_what_is_queued(make_server, make_client, until):
    """A message posted just before a close with time to spare still arrives."""
    server = make_server()
    before = set(threading.enumerate())
    background = BackgroundClient(make_client(server.address), on_message=lambda body: None)
    background.post(b"last words")
    background.close(120.0)
    assert set(threading.enumerate()) <= before
    assert until(lambda: server.receive(0.05))[0].body == b"last words"
    assert background.post(b"too late") is False


def test_ticks_come_with_the_time(make_client, opened):
    """The tick hands over the clock's reading, also when nothing arrives."""
    ticks = queue.Queue()
    start(opened, make_client(lambda: None), on_tick=ticks.put, tick_s=0.01, clock=lambda: 42.0)
    assert ticks.get(timeout=120) == 42.0
