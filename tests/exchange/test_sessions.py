"""What clients may have been sent and not acknowledged, each and together, and what comes again."""

import pytest

from mrl.exchange.limits import Limits
from mrl.exchange.sessions import CLAIM_S, MAX_TRIES, Allowance, Session, Shipment

LIMITS = Limits(deliver_bytes=100, unacknowledged_bytes=1000, all_unacknowledged_bytes=1500, queued_records=20)


def session_with(allowance, *sizes):
    """A client for which shipments of these sizes wait, of one record each."""
    session = Session("learner/a", "a", 0.0, LIMITS, allowance)
    session.queue([Shipment([number], size) for number, size in enumerate(sizes)])
    return session


def sent(session, first=1, now_s=0.0):
    """Numbers of the records that may be sent now; deliveries are counted from `first`."""
    found = []
    while shipment := session.next_shipment(first + len(found), now_s):
        found += shipment.numbers
    return found


@pytest.mark.parametrize(
    ("used_bytes", "own_bytes", "num_bytes", "admitted"),
    [
        (0, 0, 5000, True),
        (1500, 0, 5000, True),
        (400, 400, 600, True),
        (400, 400, 601, False),
        (1400, 400, 100, True),
        (1400, 400, 101, False),
    ],
    ids=["one is always allowed", "also when others have all", "own", "too much", "total", "too much in all"],
)
def test_bounds_of_each_and_of_all(used_bytes, own_bytes, num_bytes, admitted):
    """The last byte that fits, and the first that does not."""
    session = session_with(Allowance(used_bytes), num_bytes)
    session.unacknowledged_bytes = own_bytes
    assert (sent(session) == [0]) is admitted


def test_what_one_acknowledges_another_may_be_sent():
    """Together they have no more than the total, but for the one message that everybody may have."""
    allowance = Allowance()
    first, second = session_with(allowance, *[500] * 4), session_with(allowance, *[500] * 4)
    assert (sent(first, 1), sent(second, 11)) == ([0, 1], [0])
    first.acknowledge([1, 1, 999])
    assert (sent(second, 12), allowance.used_bytes) == ([1], 1500)


def test_a_session_that_ends_gives_back_what_it_had():
    """Or the total would be used up by those who left."""
    allowance = Allowance()
    session = session_with(allowance, 400, 300)
    sent(session)
    assert (allowance.used_bytes, session.end(), allowance.used_bytes) == (700, 0, 0)


def test_little_comes_again_to_a_client_that_acknowledges_nothing():
    """The first time everything, then one message, and everything again once something was acknowledged."""
    session = session_with(Allowance(), *[100] * 8)
    sent(session)
    assert len(session.overdue(CLAIM_S)) == 8
    assert [delivery for delivery, _ in session.overdue(2 * CLAIM_S)] == [1]
    session.acknowledge([6])
    assert len(session.overdue(3 * CLAIM_S)) == 7


def test_everything_is_given_up_in_the_end():
    """Also what came again more seldom."""
    session = session_with(Allowance(), *[100] * 4)
    sent(session)
    rounds = 0
    while session.num_unacknowledged:
        rounds += 1
        session.overdue(rounds * CLAIM_S)
    assert session.abandoned == 4
    assert MAX_TRIES < rounds <= 4 * MAX_TRIES
    assert session.allowance.used_bytes == 0


def test_what_waits_is_bounded_in_records():
    """What is beyond is counted; one shipment waits whatever its length."""
    session = session_with(Allowance(), *[1] * 25)
    assert (session.num_queued, session.abandoned) == (20, 5)
    other = session_with(Allowance())
    other.queue([Shipment(range(50), 50)])
    assert other.num_queued == 50


@pytest.mark.parametrize(
    ("seqs", "new"), [([1, 2, 2, 1, 3], [True, True, False, False, True]), ([0, 0, 5, 0], [True] * 4)]
)
def test_a_fetch_that_is_sent_again_is_known_by_its_number(seqs, new):
    """Numbers of a client rise; without one each is new."""
    session = session_with(Allowance())
    assert [session.is_new_fetch(seq) for seq in seqs] == new
