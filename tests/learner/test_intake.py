"""The intake answers real workers over real sockets while the learner is busy."""

import itertools
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from mrl.learner.held_out_ledger import HeldOutLedger
from mrl.learner.intake import Intake
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.learner.worker_activity import WaitBounds
from mrl.records.codec import pack_array
from mrl.records.rollouts import (
    MAX_GROUP_BYTES,
    MAX_TEXT_BYTES,
    HeldOutAnswer,
    HeldOutItem,
    StaleGroup,
    WeightsNotice,
    WorkItem,
    WorkRequest,
)
from mrl.records.version import Version, VersionSpan
from mrl.rollout.held_out_answers import HeldOutRoom
from mrl.rollout.link import WorkerLink
from mrl.tasks.pool import Prompt
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys, load_client_keys
from mrl.transport.server import ServerSocket

NOTICE = WeightsNotice(version=Version(0, 0), manifest_path="m")


@contextmanager
def connected(folder: Path, *, evaluates: bool = True, evaluates_alone: bool = False):
    """An intake and one worker's link to it."""
    keys = create_keys(folder / "keys", [Grant("worker", "a")])
    server = ServerSocket(keys, max_message_bytes=MAX_GROUP_BYTES)
    ledger = WorkLedger(SamplingLimits(2, 2, 1, 100), lambda position: f"p{position}", Version(0, 0))
    held_out = HeldOutLedger("a") if evaluates else None
    intake = Intake(server, ledger, held_out=held_out, evaluates_alone=evaluates_alone)
    link = WorkerLink("worker/a/0")
    own = load_client_keys(keys.folder, Grant("worker", "a"))
    limit = MAX_GROUP_BYTES
    socket = ClientSocket(own, lambda: server.address, identity="worker/a/0", max_message_bytes=limit)
    client = BackgroundClient(socket, on_message=link.on_message, on_tick=link.on_tick, max_queued_bytes=2 * limit)
    link.open(client.post, client.restart)
    try:
        yield intake, link, client
    finally:
        client.close(1.0)
        intake.close()


def test_work_goes_out_and_groups_come_in(tmp_path, make_group):
    """Request, grant, delivery, acknowledgement and batch, over CURVE on loopback."""
    with connected(tmp_path) as (intake, link, _):
        intake.announce(NOTICE)
        items = link.take_work(2, timeout_s=120.0)
        link.deliver([make_group(item.ticket) for item in items])
        arrived = []
        while intake.next_batch(0) is None:
            intake.wait_for_change(120.0)
            arrived += intake.arrivals()

    assert [item.prompt_id for item in items] == ["p0", "p1"]
    assert sorted(group.ticket for group in arrived) == sorted(item.ticket for item in items)
    assert link.notice == NOTICE


def test_a_group_of_long_answers_comes_in(tmp_path, make_group):
    """Two of a million tokens, with texts as long as they may be: no other message of a run is as long."""
    length = 1 << 20
    tokens, logprobs = pack_array(np.arange(length), "i4"), pack_array(np.zeros(length), "f4")
    with connected(tmp_path) as (intake, link, _):
        intake.announce(NOTICE)
        items = link.take_work(2, timeout_s=120.0)
        answer = msgspec.structs.replace(
            make_group(items[0].ticket).answers[0],
            token_ids=tokens,
            logprobs=logprobs,
            versions=[VersionSpan(length, Version(0, 0))],
            completion=b" " * MAX_TEXT_BYTES,
        )
        link.deliver([msgspec.structs.replace(make_group(item.ticket), answers=[answer] * 2) for item in items])
        while (batch := intake.next_batch(0)) is None:
            intake.wait_for_change(120.0)
    assert [group.answers == [answer] * 2 for group in batch] == [True, True]


def test_workers_hear_that_their_learner_is_there_before_its_first_weights(tmp_path, make_group):
    """It may take long to publish them; nothing is granted or taken over meanwhile."""
    with connected(tmp_path) as (intake, link, _):
        intake.open()
        link.deliver([make_group("of an earlier life")])
        while link.answered_s == float("-inf"):
            assert link.take_work(2, timeout_s=0.5) == []
        assert (link.notice, len(link._undelivered)) == (None, 1)
        assert not intake.given_up(WaitBounds(30.0, 30.0, 30.0), began_s=0.0)

        intake.announce(NOTICE)
        assert len(link.take_work(2, timeout_s=120.0)) == 2
        assert link.notice == NOTICE


def test_a_worker_hears_that_its_learner_is_done_and_asks_no_more(tmp_path, make_group):
    """What it still has is no loss, and neither is the silence that follows while other policies go on."""
    with connected(tmp_path) as (intake, link, _):
        intake.announce(NOTICE)
        link.take_work(2, timeout_s=120.0)

        intake.say_goodbye()

        assert link.is_over
        assert intake._unaware == set()
        intake.close()
        link.deliver([make_group("late")])
        with capture_logs() as logs:
            link.on_tick(time.monotonic() + 3600.0)
        assert (link.take_work(2, timeout_s=0.0), link._requests.core.reconnects, logs) == ([], 0, [])
        assert link.ask_weights(Version(0, 1), num_ranks=0, within_s=3600.0) is None


def test_a_worker_that_is_gone_holds_no_goodbye_up(tmp_path, monkeypatch):
    """It is awaited within a bound."""
    monkeypatch.setattr("mrl.learner.intake.GOODBYE_S", 0.05)
    with connected(tmp_path) as (intake, link, client):
        intake.announce(NOTICE)
        link.take_work(2, timeout_s=120.0)
        client.close(1.0)

        intake.say_goodbye()

        assert intake._unaware == {"worker/a/0"}


def test_new_weights_open_the_work_of_their_step(tmp_path, make_group):
    """From when they are announced, not from when the learner looks for its next batch."""
    with connected(tmp_path) as (intake, link, _):
        intake.announce(NOTICE)
        link.deliver([make_group(item.ticket) for item in link.take_work(100, timeout_s=120.0)])
        while intake.next_batch(0) is None:
            intake.wait_for_change(120.0)
        intake.announce(msgspec.structs.replace(NOTICE, version=Version(0, 1)))
        items = []
        while not items:
            items = link.take_work(100, timeout_s=1.0)

    assert {item.step for item in items} == {1}


def test_groups_that_were_given_up_make_room_for_others(tmp_path):
    """All that may run was granted; once the learner knows of two that will not come, it grants two more."""
    with connected(tmp_path) as (intake, link, _):
        intake.announce(NOTICE)
        first = link.take_work(4, timeout_s=120.0)
        link.deliver([StaleGroup(ticket=item.ticket, num_tokens=3) for item in first[:2]])
        more = link.take_work(4, timeout_s=120.0)
        while len(more) < 2:
            more += link.take_work(4, timeout_s=120.0)

        assert [item.prompt_id for item in first + more] == ["p0", "p1", "p2", "p3", "p4", "p5"]
        with link._changed:
            assert link._changed.wait_for(lambda: not link._undelivered, 120.0), "they are not acknowledged"
        assert intake.take_counts() == {"stale_groups": 2, "stale_tokens": 6}


@pytest.mark.parametrize(("room", "groups"), [(100, 6.0), (2, 5.0)])
def test_a_wait_widens_the_window_only_where_workers_had_room_for_more(tmp_path, make_group, room, groups):
    """A second of it: by half a batch while a worker got less than it asked for, not at all while it got everything."""
    seconds = itertools.count()
    server = ServerSocket(create_keys(tmp_path / "keys", [Grant("worker", "a")]))
    ledger = WorkLedger(SamplingLimits(2, 2, 3, 100, adaptive=True), lambda position: f"p{position}", Version(0, 0))
    assert ledger.window is not None
    ledger.window.groups = 5.0
    intake = Intake(server, ledger, clock=lambda: float(next(seconds)))
    items = ledger.grant(WorkRequest(worker="w", max_groups=room, holding=[]), 0.0)
    ledger.accept([make_group(item.ticket) for item in items], "w", 0.0)
    intake.wait_for_change(0.0)
    assert intake.next_batch(0)
    intake.close()

    assert intake.window_groups == groups


def test_garbage_is_counted_and_the_link_goes_on(tmp_path):
    """Bytes that are no message do not end the intake."""
    with connected(tmp_path) as (intake, link, client):
        intake.announce(NOTICE)
        client.post(b"\xc1garbage")

        assert len(link.take_work(2, timeout_s=120.0)) == 2
        assert intake.malformed == 1


V0 = Version(0, 0)
HELD_OUT = [Prompt(f"h{number}", "t", f"{number}?") for number in range(5)]


def kinds(items: list[WorkItem | HeldOutItem]) -> str:
    return "".join("h" if isinstance(item, HeldOutItem) else "g" for item in items)


def answers(items: list[WorkItem | HeldOutItem]) -> list[HeldOutAnswer]:
    found = [item for item in items if isinstance(item, HeldOutItem)]
    return [HeldOutAnswer(ticket=item.ticket, versions=[VersionSpan(1, V0)], reward=1.0) for item in found]


def test_held_out_prompts_come_first_and_take_the_places_of_groups(tmp_path):
    """Room for three groups of two: three held-out prompts leave one. Then the worker has no more room for them."""
    with connected(tmp_path) as (intake, link, _):
        intake.evaluate(V0, HELD_OUT)
        intake.announce(NOTICE)

        first = link.take_work(3, 120.0, V0, HeldOutRoom(3, 6))
        second = link.take_work(2, 120.0, V0)

        assert (kinds(first), kinds(second)) == ("hhhg", "gg")
        assert link.held_out_waiting == V0


def test_a_worker_that_has_no_weights_yet_keeps_all_its_places_for_groups(tmp_path):
    """An evaluation that waits for proved weights takes none of them: it would be room for nobody."""
    with connected(tmp_path) as (intake, link, _):
        intake.evaluate(V0, HELD_OUT)
        intake.announce(NOTICE)

        assert kinds(link.take_work(3, 120.0, None, HeldOutRoom(3, 6))) == "ggg"


def test_a_learner_that_never_evaluates_has_no_books_of_it(tmp_path, make_group):
    """Its workers are told of no prompts; what an earlier life that evaluated had asked for is taken and dropped."""
    with connected(tmp_path, evaluates=False) as (intake, link, _):
        intake.announce(NOTICE)
        items = link.take_work(3, 120.0, V0, HeldOutRoom(3, 6))
        link.deliver([HeldOutAnswer(ticket="0.0.held-out.1", versions=[VersionSpan(1, V0)], reward=1.0)])
        with link._changed:
            assert link._changed.wait_for(lambda: not link._undelivered, 120.0), "it is not acknowledged"

        assert (kinds(items), link.held_out_waiting, intake._held_out) == ("ggg", None, None)


def test_a_worker_without_other_work_answers_with_all_its_places(tmp_path, make_group):
    """Once all groups that may be sampled are granted, and not before."""
    with connected(tmp_path) as (intake, link, _):
        intake.announce(NOTICE)
        intake.evaluate(V0, HELD_OUT)
        groups = link.take_work(4, 120.0, V0, HeldOutRoom(0, 8))
        assert kinds(groups) == "gggg"

        assert kinds(link.take_work(4, 120.0, V0, HeldOutRoom(1, 8))) == "hhhhh"


def test_where_policies_step_together_an_evaluation_has_the_workers_for_itself(tmp_path, make_group):
    """No group is granted before the last answer of the version is there, and all groups after it."""
    with connected(tmp_path, evaluates_alone=True) as (intake, link, _):
        intake.evaluate(V0, HELD_OUT)
        intake.announce(NOTICE)
        assert link.take_work(2, 0.5) == [], "no weights yet"
        alone = link.take_work(2, 120.0, V0, HeldOutRoom(2, 4))
        link.deliver(answers(alone[:3]))
        link.give_up(alone[3:])
        rest = link.take_work(2, 120.0, V0, HeldOutRoom(2, 4))
        while len(rest) < 2:
            rest += link.take_work(2, 120.0, V0, HeldOutRoom(2, 4))
        link.deliver(answers(rest))
        groups: list[WorkItem | HeldOutItem] = []
        while not groups:
            groups = link.take_work(2, 120.0, V0, HeldOutRoom(2, 4))

        assert (kinds(alone), kinds(rest), kinds(groups)) == ("hhhh", "hh", "gg")
        (one,) = intake.evaluated()
        assert one.result is not None
        assert one.result.missing == 0


def test_held_out_answers_are_no_groups(tmp_path):
    """They are acknowledged and wake the learner up, and enter no batch and no count."""
    with connected(tmp_path) as (intake, link, _):
        intake.evaluate(V0, HELD_OUT)
        intake.announce(NOTICE)
        items = link.take_work(3, 120.0, V0, HeldOutRoom(5, 6))
        link.deliver(answers(items))
        evaluated = intake.evaluated(10.0)
        while not evaluated:
            evaluated = intake.evaluated(10.0)
        with link._changed:
            assert link._changed.wait_for(lambda: not link._undelivered, 120.0), "they are not acknowledged"

        assert evaluated[0].result is not None
        assert evaluated[0].result.accuracy == 1.0
        assert not intake.is_evaluating
        assert intake.arrivals() == []
        assert intake.take_counts() == {}
        assert intake.unsettled(0) is None


def test_what_a_worker_gave_up_is_granted_again(tmp_path):
    """As after the loss of its engine."""
    with connected(tmp_path) as (intake, link, _):
        intake.evaluate(V0, HELD_OUT[:2])
        intake.announce(NOTICE)
        items = link.take_work(1, 120.0, V0, HeldOutRoom(2, 2))
        link.give_up(items)

        assert link.take_work(1, 120.0, V0, HeldOutRoom(2, 2)) == items


def test_a_worker_that_loads_its_first_weights_keeps_what_it_was_granted(tmp_path):
    """However long it takes; one whose engine starts, and that asks for nothing, is not counted yet."""
    with connected(tmp_path) as (intake, _, _):
        intake.announce(NOTICE)
        granted = intake._answer(WorkRequest(worker="w", max_groups=2, holding=[])).items
        first_s = intake._ledger.last_seen_s["w"]

        holding = [item.ticket for item in granted]
        intake._answer(WorkRequest(worker="w", max_groups=0, holding=holding, is_loading=True))
        intake._answer(WorkRequest(worker="v", max_groups=0, holding=[], is_loading=True))
        intake._answer(WorkRequest(worker="v", max_groups=0, holding=[]))  # its engine awaits its first turn

        assert intake._ledger.last_seen_s["w"] > first_s
        assert "v" not in intake._ledger.last_seen_s
