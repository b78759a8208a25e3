"""Asynchronous batching: peers are heard as they come, and waited for within the regime's patience only."""

import threading
import time

import pytest

from mrl.errors import PeerLost
from mrl.learner.asynchronous_batching import AsynchronousBatching
from mrl.learner.worker_activity import WaitBounds
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import WorkRequest
from mrl.sharing.regime import PeerWait


def never() -> bool:
    return False


def free(books, regime, peers, telemetry, data_timeout_s: float = 240.0) -> AsynchronousBatching:
    bounds = WaitBounds(data_timeout_s, data_timeout_s, data_timeout_s)
    return AsynchronousBatching(books.intake, regime, peers, telemetry, bounds=bounds)


def test_without_patience_a_batch_goes_as_soon_as_it_is_there(make_books, make_regime, exchange, telemetry):
    """Nobody has answered, and nobody is waited for; the prompts were asked for, and are watched."""
    books, regime = make_books(), make_regime()
    peers = exchange.connect("a")
    books.sample(2)

    gathered = free(books, regime, peers, telemetry).gather(0, never)

    assert [group.prompt_id for group in gathered.groups] == ["p0", "p1"]
    assert gathered.values["time/wait_for_peers_s"] < 20.0
    assert regime.awaited() == ["p0", "p1"]


def test_a_batch_is_held_until_the_peers_have_answered(make_books, make_regime, exchange, telemetry, outcome):
    """Both answers come while it is held; then it goes at once, long before the patience ends."""
    books, regime = make_books(), make_regime(patience=PeerWait(1, 30.0))
    peers, other = exchange.connect("a"), exchange.connect("b")
    books.sample(2)
    late = threading.Timer(0.3, other.publish, args=([outcome(f"b:{p}", "b", p) for p in ("p0", "p1")],))
    late.start()

    gathered = free(books, regime, peers, telemetry).gather(0, never)

    assert sorted(regime.heard_ids) == ["b:p0", "b:p1"]
    assert 0.0 < gathered.values["time/wait_for_peers_s"] < 20.0
    assert gathered.values["time/wait_for_groups_s"] < 20.0


def test_peers_that_never_answer_are_waited_for_as_long_as_the_patience_goes(
    make_books, make_regime, exchange, telemetry
):
    """Then the batch is trained alone; the second step waits anew."""
    books, regime = make_books(), make_regime(patience=PeerWait(1, 0.2))
    batching = free(books, regime, exchange.connect("a"), telemetry)
    books.sample(4)

    waits_s = [batching.gather(step, never).values["time/wait_for_peers_s"] for step in (0, 1)]

    assert all(0.2 <= wait_s < 20.0 for wait_s in waits_s)


def test_settled_groups_go_first_and_are_not_waited_for(make_books, make_regime, exchange, telemetry, outcome):
    """With more groups ready than a step takes, those that peers have answered are trained, the others held back."""
    books, regime = make_books(), make_regime(patience=PeerWait(2, 30.0))
    peers, other = exchange.connect("a"), exchange.connect("b")
    other.publish([outcome(f"b:{p}", "b", p) for p in ("p2", "p3")])
    assert other.flush(120.0)
    books.sample(4)

    gathered = free(books, regime, peers, telemetry).gather(0, never)

    assert [group.prompt_id for group in gathered.groups] == ["p2", "p3"]


def test_a_lost_exchange_is_not_waited_for(make_books, make_regime, exchange, telemetry):
    """A daemon that has been silent for seconds will not settle anything soon."""
    now_s = [0.0]
    books, regime = make_books(), make_regime(patience=PeerWait(1, 3600.0))
    peers = exchange.connect("a", clock=lambda: now_s[0])
    exchange.cut, now_s[0] = True, 10.0
    books.sample(2)

    assert free(books, regime, peers, telemetry).gather(0, never) is not None


def test_a_restored_regime_asks_again(make_books, make_regime, exchange, telemetry, outcome):
    """What it awaits is asked for at the beginning, before any group has come."""
    books, regime = make_books(), make_regime()
    peers, other = exchange.connect("a"), exchange.connect("b")
    other.publish([outcome("b:p9", "b", "p9")])
    assert other.flush(120.0)
    regime._asked.add("p9")
    batching = free(books, regime, peers, telemetry)
    batching.begin()
    exchange.settle()
    books.sample(2)

    assert batching.gather(0, never) is not None
    assert regime.heard_ids == ["b:p9"]


def test_a_step_without_groups_ends_with_their_name_or_when_told_to(make_books, make_regime, telemetry):
    """The wait is bounded, and a role that is stopping leaves it."""
    with pytest.raises(PeerLost, match=r"no batch for step 3 from worker/a: no message from any worker for 0\.1 s"):
        free(make_books(), make_regime(), None, telemetry, data_timeout_s=0.1).gather(3, never)
    assert free(make_books(), make_regime(), None, telemetry).gather(3, lambda: True) is None


def test_a_worker_that_gets_on_slowly_is_waited_for_and_what_is_awaited_is_said(make_books, make_regime):
    """Longer than the bound: its engine starts, then a token comes now and then, then the groups are there."""
    books, said = make_books(), list[tuple[str, str]]()
    telemetry = Telemetry("learner/a", "a", lambda record: True)

    def work() -> None:
        for beat in range(45):
            starts = beat < 10
            request = WorkRequest(worker="w", max_groups=0, holding=[], progress=beat // 3, is_loading=starts)
            with books.intake._changed:
                books.intake._news.asked(request, time.monotonic(), serves=not starts)
            time.sleep(0.1)
            said.append((telemetry.beat().awaiting, telemetry.beat().whom))
        books.sample(2)

    worker = threading.Thread(target=work)
    worker.start()
    gathered = free(books, make_regime(), None, telemetry, data_timeout_s=3.0).gather(0, never)
    worker.join()
    assert gathered is not None
    assert list(dict.fromkeys(said)) == [("first weight load", "worker/a"), ("groups", "worker/a")]
