"""The intake answers real workers over real sockets while the learner is busy."""

import itertools
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from mrl.learner.intake import Intake
from mrl.learner.ledger import Pace, WorkLedger
from mrl.records.rollouts import StaleGroup, WeightsNotice, WorkRequest
from mrl.records.version import Version
from mrl.rollout.link import WorkerLink
from mrl.transport.background import BackgroundClient
from mrl.transport.client import ClientSocket
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys, load_client_keys
from mrl.transport.server import ServerSocket

NOTICE = WeightsNotice(version=Version(0, 0), manifest_path="m")


@contextmanager
def connected(folder: Path):
    """An intake and one worker's link to it."""
    keys = create_keys(folder / "keys", [Grant("worker", "a")])
    server = ServerSocket(keys)
    ledger = WorkLedger(Pace(2, 2, 1, 100), lambda position: f"p{position}", Version(0, 0))
    intake = Intake(server, ledger)
    link = WorkerLink("worker/a/0")
    own = load_client_keys(keys.folder, Grant("worker", "a"))
    socket = ClientSocket(own, lambda: server.address, identity="worker/a/0")
    client = BackgroundClient(socket, on_message=link.on_message, on_tick=link.on_tick)
    link.open(client.post, client.request_reconnect)
    try:
        yield intake, link, client
    finally:
        client.close(1.0)
        intake.close()


def test_work_goes_out_and_groups_come_in(tmp_path, make_group):
    """Request, grant, delivery, acknowledgement and batch, over CURVE on loopback."""
    with connected(tmp_path) as (intake, link, _):
        intake.announce(NOTICE)
        items = link.take_work(2, timeout_s=10.0)
        link.deliver([make_group(item.ticket) for item in items])
        while intake.next_batch(0) is None:
            intake.wait_for_change(10.0)
            arrived = intake.arrivals()

    assert [item.prompt_id for item in items] == ["p0", "p1"]
    assert sorted(group.ticket for group in arrived) == sorted(item.ticket for item in items)
    assert link.notice == NOTICE


def test_new_weights_open_the_work_of_their_step(tmp_path, make_group):
    """From when they are announced, not from when the learner looks for its next batch."""
    with connected(tmp_path) as (intake, link, _):
        intake.announce(NOTICE)
        link.deliver([make_group(item.ticket) for item in link.take_work(100, timeout_s=10.0)])
        while intake.next_batch(0) is None:
            intake.wait_for_change(10.0)
        intake.announce(msgspec.structs.replace(NOTICE, version=Version(0, 1)))
        items = [item for _ in range(3) for item in link.take_work(100, timeout_s=1.0)]

    assert {item.step for item in items} == {1}


def test_groups_that_were_given_up_make_room_for_others(tmp_path):
    """All that may run was granted; once the learner knows of two that will not come, it grants two more."""
    with connected(tmp_path) as (intake, link, _):
        intake.announce(NOTICE)
        first = link.take_work(4, timeout_s=10.0)
        link.deliver([StaleGroup(ticket=item.ticket, num_tokens=3) for item in first[:2]])
        more = link.take_work(4, timeout_s=10.0)
        while len(more) < 2:
            more += link.take_work(4, timeout_s=10.0)

        assert [item.prompt_id for item in first + more] == ["p0", "p1", "p2", "p3", "p4", "p5"]
        with link._changed:
            assert link._changed.wait_for(lambda: not link._undelivered, 10.0), "they are not acknowledged"
        assert intake.take_counts() == {"stale_groups": 2, "stale_tokens": 6}


@pytest.mark.parametrize(("room", "groups"), [(100, 6.0), (2, 5.0)])
def test_a_wait_widens_the_window_only_where_workers_had_room_for_more(tmp_path, make_group, room, groups):
    """A second of it: by half a batch while a worker got less than it asked for, not at all while it got everything."""
    seconds = itertools.count()
    server = ServerSocket(create_keys(tmp_path / "keys", [Grant("worker", "a")]))
    ledger = WorkLedger(Pace(2, 2, 3, 100, adaptive=True), lambda position: f"p{position}", Version(0, 0))
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

        assert len(link.take_work(2, timeout_s=10.0)) == 2
        assert intake.malformed == 1
