"""Requests over real sockets, to servers that drop some, go away, and come back at another address."""

import random
import time
from collections import Counter

from mrl.transport.background import BackgroundClient
from mrl.transport.requests import RequestLink, Requests

NUM_REQUESTS = 300


class Asker:
    """A background client whose requests are answered by their own number."""

    def __init__(self, client, **options) -> None:
        self.answers: Counter[int] = Counter()
        self.link = RequestLink("the server", Requests(**options))
        self._client = BackgroundClient(client, on_message=self._take, on_tick=self.link.on_tick, tick_s=0.02)
        self.link.open(self._client.post, self._client.restart)

    def ask(self) -> None:
        self.link.post(b"%d" % self.link.core.next_number, time.monotonic())

    def close(self) -> None:
        self._client.close(0.0)

    def _take(self, body: bytes) -> None:
        if self.link.answered(int(body), time.monotonic()):
            self.answers[int(body)] += 1


def test_every_request_is_answered_once_though_servers_drop_some_and_move(
    make_server, make_client, opened, until
) -> None:
    """The first server leaves with requests unread; of its successor nothing is known but where it listens."""
    servers, drops, seen = [make_server()], random.Random(5), []
    asker = Asker(make_client(lambda: servers[-1].address), repeat_s=0.1, silence_s=0.5, window_requests=20)
    opened.append(asker)

    def serve(*, drops_part: float) -> bool:
        for client, body, _grant in servers[-1].receive(0.02):
            if drops.random() >= drops_part:
                seen.append(int(body))
                if drops.random() >= drops_part:
                    servers[-1].send(client, body)
        return len(asker.answers) == NUM_REQUESTS

    for _ in range(NUM_REQUESTS):
        asker.ask()
    until(lambda: serve(drops_part=0.3) or len(asker.answers) > NUM_REQUESTS // 3)
    servers[-1].close()
    servers.append(make_server())
    until(lambda: serve(drops_part=0.3) or len(asker.answers) > 2 * NUM_REQUESTS // 3)
    servers.append(make_server())  # the one before stays, and is silent
    until(lambda: serve(drops_part=0.0))

    assert asker.answers == Counter(range(1, NUM_REQUESTS + 1))
    assert set(seen) == set(asker.answers)
    assert asker.link.core.reconnects >= 2
    assert asker.link.core.repeats > 0


def test_over_a_link_that_works_nothing_is_sent_twice(make_server, make_client, opened, until) -> None:
    """However many requests there are, and however long the server takes with one."""
    server, seen = make_server(), []
    asker = Asker(make_client(server.address), window_requests=20)
    opened.append(asker)
    for _ in range(100):
        asker.ask()

    def serve() -> bool:
        for client, body, _grant in server.receive(0.02):
            seen.append(int(body))
            if len(seen) % 40 == 0:
                time.sleep(0.3)
            server.send(client, body)
        return len(asker.answers) == 100

    until(serve)
    assert seen == list(range(1, 101))
    assert asker.link.core.repeats == asker.link.core.reconnects == 0
