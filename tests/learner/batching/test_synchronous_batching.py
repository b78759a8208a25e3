"""Synchronous batching: all hear the same, whoever was first; who is missing is named."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from mrl.errors import PeerLost
from mrl.learner.synchronous_batching import SynchronousBatching, in_fixed_order
from mrl.learner.worker_activity import WaitBounds
from mrl.metrics.telemetry import Telemetry
from mrl.records.experience import Received
from mrl.records.version import Version
from mrl.sharing.regime import PeerWait


def never() -> bool:
    return False


def codec(policy: str) -> Telemetry:
    return Telemetry(f"learner/{policy}", policy, lambda record: True)


def lockstep(
    books, regime, peers, policy="a", *, members=("a", "b"), sync_timeout_s=240.0, first_word_s=0.0
) -> SynchronousBatching:
    return SynchronousBatching(
        books.intake,
        regime,
        peers,
        codec(policy),
        members=members,
        bounds=WaitBounds(240.0, first_word_s, 240.0),
        sync_timeout_s=sync_timeout_s,
    )


@pytest.mark.parametrize("late", ["a", "b"])
def test_both_hear_what_the_other_gave_whoever_was_late(make_books, make_regime, exchange, outcome, late):
    """Three steps of two learners, one of them slow: each step hears the peer's records of that step and before."""
    books = {policy: make_books(staleness=0) for policy in "ab"}
    regimes = {policy: make_regime() for policy in "ab"}
    heard: dict[str, list[list[str]]] = {"a": [], "b": []}

    def learn(policy: str) -> None:
        peers, worker = exchange.connect(policy), exchange.connect(policy, "worker")
        batching = lockstep(books[policy], regimes[policy], peers, policy)
        for step in range(3):
            if policy == late:
                time.sleep(0.1)
            prompts = [f"p{2 * step + index}" for index in range(2)]
            worker.publish([outcome(f"{policy}:{step}.{p}", policy, p, step) for p in prompts])
            assert worker.flush(120.0)
            books[policy].intake.unsettled(step)
            books[policy].sample(2, step=step, backwards=policy == late)
            gathered = batching.gather(step, never)
            assert [group.prompt_id for group in gathered.groups] == prompts
            heard[policy].append(regimes[policy].heard_ids)
            regimes[policy].heard.clear()
            regimes[policy]._asked.clear()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(learn, policy) for policy in "ab"]:
            done.result(240.0)

    for policy, other in (("a", "b"), ("b", "a")):
        assert heard[policy] == [[f"{other}:{s}.p{2 * s}", f"{other}:{s}.p{2 * s + 1}"] for s in range(3)]


def test_who_does_not_come_is_named(make_books, make_regime, exchange):
    """After the bound, and not before."""
    books = make_books()
    books.sample(2)
    batching = lockstep(books, make_regime(), exchange.connect("a"), members=("a", "b", "c"), sync_timeout_s=0.3)
    began_s = time.monotonic()

    with pytest.raises(PeerLost, match=r"b, c did not reach step 0: no progress for 0\.3 s"):
        batching.gather(0, never)
    assert time.monotonic() - began_s >= 0.3


@contextmanager
def pinging(exchange, policy, progress):
    """A learner of `policy` whose link goes on, one second of its clock in a twentieth of one; it says `progress`."""
    now_s, ended = [0.0], threading.Event()
    client = exchange.connect(policy, clock=lambda: now_s[0])
    client.tell(lambda: progress(now_s[0]))

    def tick() -> None:
        while not ended.wait(0.05):
            now_s[0] += 1.0
            client.on_tick(now_s[0])

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(120.0)


def test_a_peer_that_gets_on_is_waited_for_until_it_stands_still(make_books, make_regime, exchange):
    """As one whose workers evaluate for longer than the bound: to its forty-first second. Then it is named."""
    books = make_books()
    books.sample(2)
    batching = lockstep(books, make_regime(), exchange.connect("a"), sync_timeout_s=1.5)
    began_s = time.monotonic()

    with (
        pinging(exchange, "b", lambda now_s: min(1 + int(now_s), 41)),
        pytest.raises(PeerLost, match=r"^b did not reach step 0: no progress for 1\.5 s$"),
    ):
        batching.gather(0, never)

    assert time.monotonic() - began_s > 40 * 0.05 + 1.5


def test_a_peer_that_was_not_heard_yet_may_be_starting(make_books, make_regime, exchange):
    """It has the time of a start; nobody has where the exchange is what is silent."""
    books = make_books()
    books.sample(2)
    peers, began_s = exchange.connect("a"), time.monotonic()

    with pytest.raises(PeerLost, match=r"^b did not reach step 0: no progress for 1 s$"):
        lockstep(books, make_regime(), peers, sync_timeout_s=0.3, first_word_s=1.0).gather(0, never)
    assert time.monotonic() - began_s >= 1.0


def test_a_peer_that_stands_still_is_named_though_another_gets_on(make_books, make_regime, exchange):
    """It is alive, and says the same all the time."""
    books = make_books()
    books.sample(2)
    batching = lockstep(books, make_regime(), exchange.connect("a"), members=("a", "b", "c"), sync_timeout_s=1.5)

    with (
        pinging(exchange, "b", lambda now_s: 1 + int(now_s)),
        pinging(exchange, "c", lambda _: 7),
        pytest.raises(PeerLost, match=r"^c did not reach step 0"),
    ):
        batching.gather(0, never)


def test_a_policy_that_comes_after_the_first_meeting_and_dies_is_named_too(make_books, make_regime, exchange):
    """The second meeting is bounded as the first is."""
    books = make_books()
    books.sample(2)
    assert exchange.connect("b").barrier(0, ["a", "b"], 0.0) == ["a"]
    batching = lockstep(books, make_regime(), exchange.connect("a"), sync_timeout_s=0.3)

    with pytest.raises(PeerLost, match="b did not reach step 0"):
        batching.gather(0, never)


def test_a_learner_that_is_stopping_leaves_the_meeting(make_books, make_regime, exchange):
    """Long before the bound."""
    books, stopping = make_books(), threading.Event()
    books.sample(2)
    threading.Timer(0.2, stopping.set).start()

    assert lockstep(books, make_regime(), exchange.connect("a")).gather(0, stopping.is_set) is None


def test_an_exchange_that_does_not_answer_ends_the_run(make_books, make_regime, exchange):
    """What peers gave cannot be left out in a run whose every bit is promised."""
    now_s = [0.0]
    books, (alone, peers) = make_books(), [exchange.connect("a", role, clock=lambda: now_s[0]) for role in "xy"]
    exchange.cut, now_s[0] = True, 10.0
    books.sample(4)

    with pytest.raises(PeerLost, match="the exchange did not answer in step 0"):
        lockstep(books, make_regime(), alone, members=("a",), sync_timeout_s=0.3).gather(0, never)
    with pytest.raises(PeerLost, match=r"did not reach step 1: .* \(the exchange does not answer\)"):
        lockstep(books, make_regime(), peers, sync_timeout_s=0.3, first_word_s=600.0).gather(1, never)


def test_without_sharing_nobody_is_met(make_books, make_regime):
    """Policies that hear nothing of each other need no exchange to be in step with themselves."""
    books = make_books()
    books.sample(2)

    assert lockstep(books, make_regime(), None).gather(0, never).values["time/wait_for_peers_s"] < 60.0


@pytest.mark.parametrize("scorer", ["", "c"])
def test_only_scores_are_waited_for_after_the_meeting(make_books, make_regime, exchange, outcome, scorer):
    """They are made late, and the regime's patience is not theirs; everything else is there once all have come.

    Records stand for scores here.
    """
    books, regime = make_books(), make_regime(patience=PeerWait(0, 0.0), scorer=scorer)
    books.sample(2)
    peer = exchange.connect("c")
    records = [outcome(f"c:{p}", "c", p) for p in ("p0", "p1")]
    late = threading.Timer(0.2, peer.publish, args=(records,))
    if scorer:
        late.start()

    lockstep(books, regime, exchange.connect("a"), members=("a",)).gather(0, never)

    assert regime.heard_ids == (["c:p0", "c:p1"] if scorer else [])


def test_a_scorer_that_is_slow_is_waited_for(make_books, make_regime, exchange, outcome):
    """The bound is for one more score."""
    books, regime = make_books(), make_regime(scorer="c")
    books.sample(2)
    peer = exchange.connect("c")
    for index, delay_s in enumerate((1.0, 2.0)):
        threading.Timer(delay_s, peer.publish, args=([outcome(f"c:p{index}", "c", f"p{index}")],)).start()

    lockstep(books, regime, exchange.connect("a"), members=("a",), sync_timeout_s=1.8).gather(0, never)

    assert sorted(set(regime.heard_ids)) == ["c:p0", "c:p1"]


def test_scores_that_never_come_end_the_run(make_books, make_regime, exchange, outcome):
    """After the bound, with the name of who owes them: a step without them would not be that of an equal run."""
    books, regime = make_books(), make_regime(scorer="c")
    books.sample(2)
    exchange.connect("c").publish([outcome("c:p0", "c", "p0")])
    began_s = time.monotonic()

    with pytest.raises(PeerLost, match=r"c did not score 1 of 2 groups of step 0 within 0\.3 s"):
        lockstep(books, regime, exchange.connect("a"), members=("a",), sync_timeout_s=0.3).gather(0, never)
    assert time.monotonic() - began_s >= 0.3


@pytest.mark.parametrize(("max_age_versions", "heard"), [(None, ["c:new", "c:old"]), (1, ["c:new"])])
def test_older_records_than_the_regime_wants_are_not_asked_for(
    make_books, make_regime, exchange, outcome, max_age_versions, heard
):
    """As old as its peer's newest version makes them."""
    books, regime = make_books(), make_regime(max_age_versions=max_age_versions)
    books.sample(2, step=5)
    peer = exchange.connect("c")
    peer.publish([outcome("c:old", "c", "p0", 3), outcome("c:new", "c", "p0", 4)])
    peer.announce(Version(0, 5))
    exchange.settle()

    lockstep(books, regime, exchange.connect("a"), members=("a",)).gather(5, never)

    assert regime.heard_ids == heard


def test_the_order_is_that_of_prompts_and_steps_and_not_of_arrival(outcome):
    """Later steps, other prompts and repetitions are left out; a resume's new epoch changes no order."""
    asked = {"p1", "p2"}
    received = [
        Received(record, 0)
        for record in (
            outcome("c:0.2:0", "c", "p1", 2),
            outcome("b:0.9:0", "b", "p1", 3),
            outcome("b:0.10:0", "b", "p1", 3),
            outcome("b:0.11:0", "b", "p1", 4),
            outcome("b:0.1:0", "b", "p2", 0),
            outcome("b:0.3:0", "b", "p3", 0),
            outcome("b:0.9:0", "b", "p1", 3),
        )
    ]
    expected = ["b:0.10:0", "b:0.9:0", "c:0.2:0", "b:0.1:0"]

    for order in (received, received[::-1]):
        assert [item.record.record_id for item in in_fixed_order(order, asked, 3, limit=4)] == expected
    two = in_fixed_order(received, asked, 3, limit=2)
    assert [item.record.record_id for item in two] == ["b:0.10:0", "b:0.9:0", "b:0.1:0"]
    resumed = [outcome("b:0.9:0", "b", "p1", 3), outcome("b:1.10:0", "b", "p1", 4, 1)]
    steps = [i.record.newest.step for i in in_fixed_order([Received(r, 0) for r in resumed], asked, 4, limit=4)]
    assert steps == [4, 3]


def test_what_was_published_before_a_resume_as_well_is_there_once(outcome):
    """Sampled again at the step of the resume, it takes no older record's place."""
    again = [outcome("b:0.7:0", "b", "p1", 4, 0), outcome("b:1.7:0", "b", "p1", 4, 1)]
    others = [outcome("b:0.3:0", "b", "p1", 2, 0), outcome("c:0.7:0", "c", "p1", 4, 0)]
    for order in ([*again, *others], [*others, *again[::-1]]):
        found = in_fixed_order([Received(record, 0) for record in order], {"p1"}, 5, limit=3)
        assert [item.record.record_id for item in found] == ["b:1.7:0", "c:0.7:0", "b:0.3:0"]
