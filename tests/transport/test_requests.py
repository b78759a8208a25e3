"""Requests are sent until they are answered, whatever the link loses, doubles or turns round."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mrl.records.unit_messages import node_orders_decoder
from mrl.transport.requests import MAX_REPEAT_S, MAX_REPORTS, Due, RequestLink, Requests

A, B, C = b"a", b"bb", b"ccc"


def asked(*bodies: bytes, **options) -> Requests:
    """Requests handed in, and sent as far as the window allows, at 0 s. They are numbers 1, 2, ..."""
    requests = Requests(**options)
    assert [requests.post(body, 0.0) for body in bodies] == list(range(1, len(bodies) + 1))
    requests.first(0.0)
    return requests


def test_a_request_is_sent_at_once_and_until_it_is_answered_is_kept() -> None:
    requests = Requests()
    assert requests.post(A, 0.0) == 1
    assert requests.first(0.0) == [A]
    assert requests.first(0.1) == []
    assert (len(requests), requests.num_bytes, requests.oldest, requests.asked_s(1)) == (1, 1, 1, 0.0)

    assert requests.answered(1, 0.2)
    assert not requests.answered(1, 0.3), "an answer that comes twice is one answer"
    assert not requests.answered(7, 0.3)
    assert (len(requests), requests.num_bytes, requests.oldest, requests.asked_s(1)) == (0, 0, None, None)


def test_what_a_living_server_left_unanswered_is_sent_again_after_ever_longer_pauses() -> None:
    """Each time as the same bytes, up to a longest pause."""
    requests = asked(A)
    again_s = []
    for tenth in range(1, 700):
        requests.answered(None, tenth / 10)
        if requests.due(tenth / 10).bodies:
            again_s.append(tenth / 10)
    assert again_s == [1.0, 3.0, 7.0, 15.0, 31.0, 47.0, 63.0]
    assert again_s[-1] - again_s[-2] == MAX_REPEAT_S
    assert requests.repeats == 7
    assert requests.reconnects == 0


def test_a_server_that_says_nothing_gets_no_second_copy_but_a_new_link() -> None:
    """On which everything unanswered goes again, in order; and again every three seconds."""
    requests = asked(A, B, C)
    requests.answered(2, 0.0)
    done = {tenth / 10: due for tenth in range(1, 70) if any(due := requests.due(tenth / 10))}
    assert done == {3.1: Due(True, [A, C]), 6.2: Due(True, [A, C])}
    assert requests.reconnects == 2
    assert requests.repeats == 4


def test_silence_counts_from_the_first_request_and_from_the_last_word() -> None:
    """A link on which nothing is asked may be silent for ever."""
    requests = Requests()
    assert not requests.due(1000.0).reconnects
    requests.post(A, 1000.0)
    requests.answered(None, 1002.0)
    assert not requests.due(1004.9).reconnects
    assert requests.waited_s(1004.5) == 2.5
    assert requests.due(1005.1).reconnects
    requests.answered(1, 1006.0)
    assert requests.waited_s(2000.0) == 0.0


def test_what_stands_behind_an_answered_request_waits_on_and_what_stood_before_it_was_lost() -> None:
    """A server answers in order: it has yet to come to those behind."""
    requests = asked(A, B, C)
    requests.answered(2, 0.5)
    assert requests.due(1.0).bodies == [A]
    assert requests.due(1.4).bodies == []
    assert requests.due(1.5).bodies == [C]


@pytest.mark.parametrize(
    ("options", "sent"),
    [({"window_requests": 2}, [A, B]), ({"window_bytes": 5}, [A, B]), ({"window_bytes": 6}, [A, B, C])],
)
def test_a_window_bounds_what_is_under_way(options: dict[str, int], sent: list[bytes]) -> None:
    """In requests and in bytes; an answer makes room."""
    requests = Requests(**options)  # type: ignore[arg-type]
    for body in (A, B, C):
        requests.post(body, 0.0)
    assert requests.first(0.0) == sent
    requests.answered(1, 0.1)
    assert sent + requests.first(0.1) == [A, B, C]


def test_one_request_may_always_be_under_way() -> None:
    requests = asked(C, C, window_bytes=1)
    assert requests.first(0.0) == []
    requests.answered(1, 0.1)
    assert requests.first(0.1) == [C]


def test_a_window_that_shrinks_and_grows_is_kept_from_then_on() -> None:
    requests = asked(A, A, A, A, window_bytes=2)
    requests.window_bytes = 1
    requests.answered(1, 0.1)
    assert requests.first(0.1) == []
    requests.window_bytes = 3
    assert requests.first(0.2) == [A, A]


@pytest.mark.parametrize("options", [{"window_requests": 2}, {"window_bytes": 4}])
def test_a_new_link_keeps_to_the_window_too_and_has_all_of_it(options: dict[str, int]) -> None:
    requests = asked(A, B, C, **options)
    assert requests.due(3.1) == Due(True, [A, B])
    requests.answered(2, 3.2)
    assert requests.due(3.2) == Due(False, [C])


def test_what_is_given_up_before_it_was_sent_makes_no_room() -> None:
    requests = asked(A, B, C, window_bytes=3)
    requests.forget(3)
    requests.post(A, 0.1)
    assert requests.first(0.1) == []


def test_on_a_new_link_the_pauses_are_short_again() -> None:
    requests = asked(A)
    for second in (1.0, 3.0, 4.0):
        requests.answered(None, second)
        requests.due(second)
    assert requests.due(7.5) == Due(True, [A])
    requests.answered(None, 8.5)
    assert requests.due(8.5) == Due(False, [A])


def test_what_is_given_up_is_sent_no_more_and_says_nothing_of_the_server() -> None:
    requests = asked(A, B)
    assert requests.forget(1)
    assert not requests.forget(1)
    assert requests.due(3.1) == Due(True, [B])


def test_a_report_is_sent_once_and_a_later_answer_is_one_to_it_too() -> None:
    """Its numbers are those of requests, which it does not answer."""
    requests = asked(A)
    assert [requests.report(second) for second in (1.0, 2.0, 2.5)] == [2, 3, 4]
    assert requests.asked_s(3) == 2.0
    assert requests.due(3.1) == Due(True, [A])
    assert requests.answered(3, 3.2)
    assert not requests.answered(2, 3.2)
    assert [requests.asked_s(number) for number in (1, 2, 3, 4)] == [0.0, None, None, 2.5]
    assert requests.answered(requests.newest_report, 3.3), "where answers carry no number"
    assert [requests.asked_s(number) for number in (1, 4)] == [0.0, None]


def test_unanswered_reports_date_the_silence_and_are_bounded() -> None:
    requests = Requests()
    for second in range(10 * MAX_REPORTS):
        requests.report(float(second))
    assert requests.waited_s(1000.0) == 1000.0
    assert sum(requests.asked_s(number) is not None for number in range(1, 10 * MAX_REPORTS + 1)) == MAX_REPORTS
    assert requests.due(1000.0).reconnects
    requests.forget(requests.newest_report)
    assert not requests.due(2000.0).reconnects


def test_numbers_begin_where_no_earlier_life_of_the_sender_was() -> None:
    requests = Requests(first_number=1000)
    assert (requests.next_number, requests.post(A, 0.0), requests.report(0.0)) == (1000, 1000, 1001)


class Wire:
    """What a `RequestLink` did, in order."""

    def __init__(self) -> None:
        self.did: list[bytes | str] = []
        self.link = RequestLink("the server", Requests(window_requests=1))
        self.link.open(self.did.append, lambda: self.did.append("reconnect"))


def test_a_link_posts_what_is_due_and_reconnects_before_it_sends_again() -> None:
    wire = Wire()
    assert wire.link.post(A, 0.0) == 1
    assert wire.link.post(B, 0.0) == 2
    assert wire.link.report(C, 0.0) == 3
    wire.link.on_tick(3.1)
    assert wire.link.answered(1, 3.2)
    assert wire.did == [A, C, "reconnect", A, B]


def test_a_silent_server_is_named_with_how_long_it_has_been_silent_each_time_that_doubles() -> None:
    """And once more when it answers."""
    wire = Wire()
    wire.link.answered(None, 0.0)
    wire.link.post(A, 10.0)
    with capture_logs() as logs:
        for quarter in range(40, 160):
            wire.link.on_tick(quarter / 4)
        wire.link.answered(1, 40.0)
        wire.link.answered(None, 41.0)
        wire.link.on_tick(100.0)
        wire.link.report(B, 100.0)
        wire.link.on_tick(104.0)
    told = [(line["event"], line["whom"], line.get("for_s") or line["after_s"]) for line in logs]
    assert told == [
        ("no answer", "the server", 3.2),
        ("no answer", "the server", 6.5),
        ("no answer", "the server", 13.0),
        ("no answer", "the server", 26.0),
        ("answers again", "the server", 30.0),
        ("no answer", "the server", 4.0),
    ]
    assert [line["log_level"] for line in logs] == ["warning"] * 4 + ["info", "warning"]


def test_what_cannot_be_read_is_said_and_is_no_answer() -> None:
    wire = Wire()
    wire.link.post(A, 0.0)
    with capture_logs() as logs:
        assert wire.link.read(b"\xc1", node_orders_decoder) is None
    assert [(line["event"], line["whom"]) for line in logs] == [("unreadable answer", "the server")]
    assert wire.link.core.waited_s(1.0) == 1.0


class Network:
    """A server that answers every request that reaches it, behind a network that does what the test says."""

    def __init__(self, window_requests: int, window_bytes: int) -> None:
        self.now_s = 0.0
        self.requests = Requests(window_requests=window_requests, window_bytes=window_bytes)
        self.bodies: dict[int, bytes] = {}
        self.to_server: list[int] = []
        self.to_client: list[int] = []
        self.arrived: list[int] = []
        self.answered: list[int] = []
        self.on_link: list[int] = []
        """Requests sent over the present link, in the order of their first sending over it."""

    def post(self, num_bytes: int) -> None:
        number = self.requests.next_number
        body = number.to_bytes(2, "big") + bytes(num_bytes)
        self.bodies[number] = body
        assert self.requests.post(body, self.now_s) == number
        self.send(self.requests.first(self.now_s))

    def send(self, bodies: Sequence[bytes]) -> None:
        for body in bodies:
            number = int.from_bytes(body[:2], "big")
            assert self.bodies[number] is body, "encoded once"
            assert number not in self.answered
            if number not in self.on_link:
                assert self.on_link == [] or number > max(self.on_link), "first sendings over a link are in order"
                self.on_link.append(number)
                self._check_window()
            self.to_server.append(number)

    def _check_window(self) -> None:
        under_way = [number for number in self.on_link if number not in self.answered]
        num_bytes = sum(len(self.bodies[number]) for number in under_way)
        is_within = len(under_way) <= self.requests.window_requests and num_bytes <= self.requests.window_bytes
        assert is_within or len(under_way) == 1

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        due = self.requests.due(self.now_s)
        if due.reconnects:
            self.break_link()
        self.send(due.bodies)

    def break_link(self) -> None:
        """What is under way is lost with it; answers may have come already."""
        self.to_server, self.on_link = [], []

    def serve(self, place: int) -> None:
        if self.to_server:
            number = self.to_server.pop(place % len(self.to_server))
            self.arrived.append(number)
            self.to_client.append(number)

    def answer(self, place: int) -> None:
        if self.to_client:
            number = self.to_client.pop(place % len(self.to_client))
            is_new = self.requests.answered(number, self.now_s)
            assert is_new == (number not in self.answered), "counted once"
            if is_new:
                self.answered.append(number)
            self.send(self.requests.first(self.now_s))

    def act(self, action: str, place: int) -> None:
        queue = self.to_server if action.endswith("request") else self.to_client
        match action:
            case "post":
                self.post(place)
            case "tick":
                self.tick(place / 10)
            case "serve":
                self.serve(place)
            case "answer":
                self.answer(place)
            case "lose request" | "lose answer":
                del queue[place : place + 1]
            case "double request" | "double answer":
                queue.extend(queue[place : place + 1])
            case "new server":
                self.break_link()
                self.to_client = []
                self.requests.start_over()


ACTIONS = (
    "post", "post", "tick", "tick", "serve", "serve", "answer", "answer", "lose request", "lose answer",
    "double request", "double answer", "new server",
)  # fmt: skip


@settings(max_examples=300)
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 40)), max_size=80),
    window_requests=st.integers(1, 5),
    window_bytes=st.integers(1, 100),
)
def test_every_request_is_answered_exactly_once_in_the_end(
    actions: list[tuple[str, int]], window_requests: int, window_bytes: int
) -> None:
    """Messages are lost, doubled and overtaken, links break, servers start anew; then the network works."""
    network = Network(window_requests, window_bytes)
    for action, place in actions:
        network.act(action, place)
    for _ in range(100 * (len(network.bodies) + 1)):
        network.tick(0.1)
        network.serve(0)
        network.answer(0)
    assert sorted(network.answered) == list(network.bodies)
    assert set(network.arrived) == set(network.bodies)
    assert (len(network.requests), network.requests.num_bytes) == (0, 0)


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), breaks=st.lists(st.booleans(), max_size=20))
def test_over_links_that_only_break_requests_reach_the_server_in_order(sizes: list[int], breaks: list[bool]) -> None:
    """What a link delivered before it broke is delivered again by the next, but nothing overtakes anything."""
    network = Network(3, 60)
    for size in sizes:
        network.post(size)
    for is_broken in [*breaks, *[False] * (3 * len(sizes))]:
        network.serve(0)
        if is_broken:
            network.act("new server", 0)
        network.answer(0)
        network.tick(0.1)
    first_arrivals = list(dict.fromkeys(network.arrived))
    assert first_arrivals == sorted(network.bodies)


def test_a_long_request_is_given_time_to_cross_a_slow_link():
    """While it does nothing else is heard: a new link would begin it again, and a copy would follow it."""
    requests = Requests()
    requests.post(bytes(40 * 1024 * 1024), 0.0)
    requests.first(0.0)
    assert not requests.due(12.9).reconnects
    assert requests.due(13.1).reconnects
    other = Requests()
    report = other.report(0.0)
    other.post(bytes(40 * 1024 * 1024), 0.0)
    other.first(0.0)
    other.answered(report, 1.0)
    assert [other.due(now_s).bodies for now_s in (3.0, 10.9)] == [[], []]
    assert len(other.due(12.1).bodies) == 1
