"""The worker's link repeats what is not answered and is not confused by repetitions."""

import threading

import msgspec
from structlog.testing import capture_logs

from mrl.records.codec import decode, encode
from mrl.records.rollouts import (
    Groups,
    GroupsAck,
    HeldOutAnswer,
    HeldOutAnswers,
    HeldOutItem,
    ScoredGroup,
    StaleGroup,
    WeightsNotice,
    WeightsRequest,
    WeightsRoute,
    WorkGrant,
    WorkItem,
    WorkRequest,
    worker_message_decoder,
)
from mrl.records.version import Version, VersionSpan
from mrl.rollout.held_out_answers import HeldOutRoom
from mrl.rollout.link import WorkerLink, WorkerProgress
from mrl.transport.requests import WINDOW_REQUESTS
from tests.support.answers import made_answer

NOTICE = WeightsNotice(version=Version(0, 4), manifest_path="m")


class Wire:
    """Collects what a link posts, and lets a test be the learner."""

    def __init__(self) -> None:
        self.now_s, self.reconnects = 0.0, 0
        self.link = WorkerLink("w", clock=lambda: self.now_s)
        self.bodies: list[bytes] = []
        self.sent: list[WorkRequest | Groups] = []
        self.link.open(self._post, self._reconnect)

    def _post(self, body: bytes) -> None:
        self.bodies.append(body)
        self.sent.append(decode(body, worker_message_decoder))

    def _reconnect(self) -> None:
        self.reconnects += 1

    def grant(self, *tickets: str) -> None:
        items = [WorkItem(ticket=t, position=0, prompt_id="p", group_size=2, step=0) for t in tickets]
        self.link.on_message(encode(WorkGrant(items=items, weights=NOTICE)))

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        self.link.on_tick(now_s)


def group(ticket: str) -> ScoredGroup:
    return ScoredGroup(ticket=ticket, prompt_id="p", task="t", prompt_token_ids=b"", answers=[made_answer(4)])


def test_every_request_tells_how_far_the_worker_is():
    """Before there is an engine: that it starts."""
    wire = Wire()
    wire.tick(1.1)
    wire.link.tell(lambda: WorkerProgress(7, is_loading=False))
    wire.tick(2.2)
    assert [(asked.progress, asked.is_loading) for asked in wire.sent] == [(0, True), (7, False)]


def test_granted_work_reaches_the_waiting_worker():
    """A grant that arrives on another thread ends the wait, and carries the newest weights."""
    wire = Wire()
    timer = threading.Timer(0.05, wire.grant, args=("a", "b"))
    timer.start()

    items = wire.link.take_work(2, timeout_s=120.0)

    assert [item.ticket for item in items] == ["a", "b"]
    assert wire.link.notice == NOTICE


def test_other_weights_end_the_wait_and_the_request_says_what_would_sample():
    """A worker that is behind gets no work before it has taken them; the same ones again end no wait."""
    wire = Wire()
    wire.grant()
    timer = threading.Timer(0.05, lambda: (wire.grant(), wire.grant("a")))
    timer.start()
    assert [item.ticket for item in wire.link.take_work(2, 120.0, Version(0, 4))] == ["a"]

    newer = msgspec.structs.replace(NOTICE, version=Version(0, 5))
    timer = threading.Timer(0.05, lambda: wire.link.on_message(encode(WorkGrant(items=[], weights=newer))))
    timer.start()
    assert wire.link.take_work(2, 3600.0, Version(0, 4)) == []

    assert wire.link.notice == newer
    assert [message.serving for message in wire.sent] == [Version(0, 4), Version(0, 4)]


def test_a_nudge_ends_one_wait_for_work():
    """For something else that the worker has to look at; one that came before the wait ends it, too."""
    wire = Wire()
    timer = threading.Timer(0.05, wire.link.nudge)
    timer.start()
    assert wire.link.take_work(2, 3600.0) == []
    timer = threading.Timer(0.05, wire.grant, args=("a",))
    timer.start()
    assert [item.ticket for item in wire.link.take_work(2, 3600.0)] == ["a"]
    wire.link.nudge()
    assert wire.link.take_work(2, 3600.0) == []


def test_an_unanswered_request_is_repeated_and_a_late_double_grant_counts_once():
    """After a second the worker asks again; the same ticket granted twice is one piece of work."""
    wire = Wire()
    taken = []
    waiter = threading.Thread(target=lambda: taken.extend(wire.link.take_work(3, 120.0)))
    waiter.start()
    while not wire.sent:
        pass
    wire.tick(1.5)
    wire.grant("a")
    wire.grant("a")
    waiter.join()
    assert [item.ticket for item in taken] == ["a"]

    assert [type(message) for message in wire.sent] == [WorkRequest, WorkRequest]
    assert wire.link.take_work(3, 0.0) == []
    assert wire.sent[-1].holding == ["a"]
    assert wire.sent[-1].max_groups == 3


def test_groups_are_sent_again_until_acknowledged():
    """A second later over a link that works, as the same bytes, and forgotten on acknowledgement."""
    wire = Wire()
    wire.grant("a")
    wire.link.deliver([group("a")])
    wire.tick(1.0)
    wire.grant()
    wire.tick(1.5)
    told = [body for body in wire.bodies if isinstance(decode(body, worker_message_decoder), Groups)]
    assert len(told) == 2
    assert told[0] is told[1], "encoded once"

    wire.link.on_message(encode(GroupsAck(tickets=["a"], weights=NOTICE)))
    wire.tick(3.0)
    wire.grant()
    wire.tick(9.0)

    assert sum(isinstance(message, Groups) for message in wire.sent) == 2
    assert isinstance(wire.sent[-1], WorkRequest)
    assert wire.sent[-1].holding == []


def test_after_a_reconnect_all_that_is_not_acknowledged_is_sent_again_in_order():
    """Acknowledged groups are not; a learner that heard the others already ignores them."""
    wire = Wire()
    wire.link.deliver([group(ticket) for ticket in "abcd"])
    wire.link.on_message(encode(GroupsAck(tickets=["b"], weights=NOTICE)))
    del wire.sent[:]
    wire.tick(3.1)

    told = [message.groups[0].ticket for message in wire.sent if isinstance(message, Groups)]
    assert (wire.reconnects, told) == (1, ["a", "c", "d"])


def test_what_was_given_up_is_told_until_acknowledged():
    """As finished groups are."""
    wire = Wire()
    wire.grant("a", "b")
    given_up = StaleGroup(ticket="b", num_tokens=5)
    wire.link.deliver([group("a"), given_up])
    wire.tick(3.1)
    told = [message for message in wire.sent if isinstance(message, Groups)]
    assert [(message.groups, message.stale) for message in told] == [([group("a")], []), ([], [given_up])] * 2

    wire.link.on_message(encode(GroupsAck(tickets=["a", "b"], weights=NOTICE)))
    wire.tick(6.3)

    assert sum(isinstance(message, Groups) for message in wire.sent) == 4
    assert wire.sent[-1].holding == []


def test_an_undelivered_ticket_is_held_and_not_sampled_again():
    """A grant repeated for a group that is under way is ignored, and requests say that it is held."""
    wire = Wire()
    wire.grant("a")
    wire.link.deliver([group("a")])
    wire.grant("a")

    assert wire.link.take_work(1, 0.0) == []
    assert wire.sent[-1].holding == ["a"]


def test_after_silence_the_link_looks_for_the_learner_again():
    """Three seconds without an answer ask for a new connection, once per three seconds."""
    wire = Wire()
    wire.link.deliver([group("a")])
    for now_s in (1.0, 2.9, 3.1, 3.2, 6.0, 6.2):
        wire.tick(now_s)

    assert wire.reconnects == 2


def test_work_given_up_is_no_longer_held():
    """The learner grants it anew because the next request does not name it."""
    wire = Wire()
    wire.grant("a")
    wire.link.give_up(wire.link.take_work(1, 0.0))
    wire.link.take_work(1, 0.0)

    assert wire.sent[-1].holding == []


def test_garbage_from_the_learner_is_said_and_is_no_answer():
    """Bytes that are no message change nothing."""
    wire = Wire()
    with capture_logs() as logs:
        wire.link.on_message(b"\xc1")

    assert [line["event"] for line in logs] == ["unreadable answer"]
    assert wire.link.answered_s == float("-inf")


def test_a_worker_that_samples_for_long_says_what_it_holds():
    """Every second, without asking for more, so that its work is not granted to others."""
    wire = Wire()
    wire.grant("a")
    wire.link.take_work(1, 0.0)
    sent = len(wire.sent)
    for now_s in (0.5, 0.9, 1.1, 1.5, 2.2):
        wire.tick(now_s)

    assert [(m.max_groups, m.holding) for m in wire.sent[sent:]] == [(0, ["a"]), (0, ["a"])]


def test_large_groups_are_under_way_one_at_a_time():
    """Of 3 MB each; the next one leaves when one was acknowledged."""
    wire = Wire()
    big = [msgspec.structs.replace(group(t), prompt_token_ids=bytes(3_000_000)) for t in ("a", "b", "c")]

    wire.link.deliver(big)
    assert [message.groups[0].ticket for message in wire.sent] == ["a"]
    wire.link.on_message(encode(GroupsAck(tickets=["a"], weights=NOTICE)))

    assert [message.groups[0].ticket for message in wire.sent] == ["a", "b"]


def test_a_group_that_no_message_has_room_for_is_given_up(monkeypatch):
    """With a word in the log; it could never be delivered, and another takes its place."""
    monkeypatch.setattr("mrl.rollout.link.MAX_GROUP_BYTES", 5000)
    wire = Wire()
    answer = msgspec.structs.replace(group("a").answers[0], completion=bytes(1000))
    with capture_logs() as logs:
        wire.link.deliver([msgspec.structs.replace(group("a"), answers=[answer] * 9), group("b")])
    long, short = wire.sent
    assert (long.groups, long.stale) == ([], [StaleGroup(ticket="a", num_tokens=9)])
    assert [one.ticket for one in short.groups] == ["b"]
    assert [(line["event"], line["most"]) for line in logs] == [("group dropped: exceeds the message size limit", 5000)]


def test_what_was_asked_a_moment_ago_is_not_asked_again():
    """The learner would take a second request without the grant under way for that of a worker that lost it."""
    wire = Wire()
    for max_groups in (2, 2, 1):
        wire.link.take_work(max_groups, 0.0)
    assert [message.max_groups for message in wire.sent] == [2]
    wire.grant()
    wire.link.take_work(1, 0.0)

    assert [message.max_groups for message in wire.sent] == [2, 1]


def test_work_comes_in_while_other_work_is_under_way():
    """Each item is given once; a request asks for what is missing, and names everything that is held."""
    wire = Wire()
    wire.grant("a", "b", "c")

    assert [item.ticket for item in wire.link.take_work(2, 0.0)] == ["a", "b"]
    assert [item.ticket for item in wire.link.take_work(2, 0.0)] == ["c"]
    assert wire.link.take_work(2, 0.0) == []
    assert (wire.sent[-1].max_groups, wire.sent[-1].holding) == (2, ["a", "b", "c"])
    wire.link.deliver([group("b")])
    wire.link.take_work(2, 0.0)

    assert [type(message) for message in wire.sent] == [WorkRequest, Groups], "one unanswered request at a time"


def test_a_worker_that_goes_to_sleep_holds_nothing_and_awaits_a_word_that_it_was_heard() -> None:
    """Then it begins anew: no work, and no weights that it was told of before."""
    wire = Wire()
    wire.grant("0.1", "0.2")
    wire.link.take_work(1, 0.0)
    learner = threading.Timer(0.05, wire.grant)
    learner.start()
    wire.link.rest(120.0)
    learner.join()
    newest = wire.sent[-1]
    assert isinstance(newest, WorkRequest)
    assert (newest.max_groups, newest.holding) == (0, [])

    wire.link.begin_anew()
    assert wire.link.notice is None
    assert wire.link.take_work(2, 0.0) == []
    assert isinstance(wire.sent[-1], WorkRequest)
    assert wire.sent[-1].max_groups == 2
    wire.grant("0.3")
    assert [item.ticket for item in wire.link.take_work(2, 0.0)] == ["0.3"]


def test_a_worker_whose_learner_is_away_goes_to_sleep_all_the_same() -> None:
    wire = Wire()
    wire.link.deliver([group("0.1")])
    wire.link.rest(0.01)
    wire.link.begin_anew()
    assert wire.link.take_work(2, 0.0) == []
    asked = wire.sent[-1]
    assert isinstance(asked, WorkRequest)
    assert asked.max_groups == 2, "what was not answered before is not awaited"
    wire.tick(3.1)
    assert any(isinstance(sent, Groups) for sent in wire.sent[2:]), "what is not acknowledged is sent again"


def test_weights_are_asked_for_until_there_is_an_answer_or_nobody_waits() -> None:
    """Each time by the same attempt; an answer that comes too late is none."""
    wire = Wire()

    def learner() -> None:
        wire.tick(1.1)
        wire.grant()
        wire.tick(1.2)
        [first, again] = [message for message in wire.sent if isinstance(message, WeightsRequest)]
        assert first == again
        wire.link.on_message(encode(WeightsRoute(attempt=first.attempt, weights=NOTICE, folder="f")))

    timer = threading.Timer(0.05, learner)
    timer.start()
    route = wire.link.ask_weights(Version(0, 4), num_ranks=0, within_s=120.0)
    assert route is not None
    assert route.folder == "f"

    assert wire.link.ask_weights(Version(0, 5), num_ranks=0, within_s=0.0) is None
    asked = sum(isinstance(message, WeightsRequest) for message in wire.sent)
    wire.grant()
    wire.tick(9.0)
    assert sum(isinstance(message, WeightsRequest) for message in wire.sent) == asked


def held_out(*tickets: str) -> list[HeldOutItem]:
    return [HeldOutItem(ticket=ticket, prompt_id="p", version=Version(0, 4)) for ticket in tickets]


def test_held_out_prompts_come_before_groups_and_in_their_places() -> None:
    """Room for three groups of two; three prompts leave one. The rest is given when there is room."""
    wire = Wire()
    items = [WorkItem(ticket=t, position=0, prompt_id="p", group_size=2, step=0) for t in "abc"]
    grant = WorkGrant(items=items, weights=NOTICE, held_out=held_out("x", "y", "z"), held_out_waiting=Version(0, 4))
    wire.link.on_message(encode(grant))

    assert [item.ticket for item in wire.link.take_work(3, 0.0)] == ["x", "y", "z", "a"]
    assert wire.link.held_out_waiting == Version(0, 4)
    assert [item.ticket for item in wire.link.take_work(0, 0.0)] == []
    assert [item.ticket for item in wire.link.take_work(2, 0.0)] == ["b", "c"]


def test_room_for_held_out_prompts_is_asked_for_once() -> None:
    """Not in the requests that only say what is held."""
    wire = Wire()
    wire.link.take_work(2, 0.0, Version(0, 4), HeldOutRoom(3, 5))
    asked = wire.sent[-1]
    assert isinstance(asked, WorkRequest)
    assert (asked.max_groups, asked.max_held_out, asked.max_held_out_alone) == (2, 3, 5)
    wire.grant()

    wire.tick(1.5)

    told = wire.sent[-1]
    assert isinstance(told, WorkRequest)
    assert (told.max_groups, told.max_held_out, told.max_held_out_alone) == (0, 0, 0)


def test_held_out_answers_are_sent_again_until_acknowledged() -> None:
    """In a message of their own."""
    wire = Wire()
    answer = HeldOutAnswer(ticket="x", versions=[VersionSpan(1, Version(0, 4))], reward=1.0)
    wire.link.deliver([group("a"), answer])
    wire.tick(3.1)
    assert [type(message) for message in wire.sent] == [Groups, HeldOutAnswers, WorkRequest, Groups, HeldOutAnswers]
    assert wire.sent[1].answers == [answer]  # type: ignore[union-attr]

    wire.link.on_message(encode(GroupsAck(tickets=["a", "x"], weights=NOTICE)))
    wire.tick(9.0)

    assert wire.sent[-1].holding == []  # type: ignore[union-attr]
    assert sum(isinstance(message, HeldOutAnswers) for message in wire.sent) == 2


def test_a_flood_of_held_out_answers_goes_as_fast_as_the_learner_takes_them() -> None:
    """As after a learner that was away for long."""
    wire = Wire()
    wire.link.deliver([HeldOutAnswer(ticket=f"x{number}") for number in range(2 * WINDOW_REQUESTS)])
    assert len(wire.sent) == WINDOW_REQUESTS
    for number in range(2 * WINDOW_REQUESTS):
        wire.link.on_message(encode(GroupsAck(tickets=[f"x{number}"], weights=NOTICE)))
    told = [message.answers[0].ticket for message in wire.sent]  # type: ignore[union-attr]
    assert told == [f"x{number}" for number in range(2 * WINDOW_REQUESTS)]


def test_a_nudge_ends_the_wait_for_work():
    """One that comes before the wait does, too, and one wait alone."""
    wire = Wire()
    wire.link.nudge()
    assert wire.link.take_work(2, 3600.0) == []
    waiting = threading.Thread(target=wire.link.take_work, args=(2, 3600.0))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    wire.link.nudge()
    waiting.join(60)
    assert not waiting.is_alive()
