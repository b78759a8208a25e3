"""What clients may have been sent and not acknowledged, each and together, and what comes again."""

import pytest

from mrl.exchange.sessions import CLAIM_S, MAX_REPEATED_BYTES, MAX_TRIES, Allowance, Session, Shipment


def session_with(allowance, *sizes):
    """A client for which shipments of these sizes wait."""
    session = Session("learner/a", "a", 0.0, allowance)
    session.queue([Shipment({f"r{number}": size}) for number, size in enumerate(sizes)])
    return session


def sent(session, now_s=0.0):
    """Ids of what may be sent now."""
    found = []
    while shipment := session.next_shipment(now_s):
        found += shipment.sizes
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
    assert Allowance(1000, 1500, used_bytes).admits(own_bytes, num_bytes) is admitted


def test_what_one_acknowledges_another_may_be_sent():
    """Together they have no more than the total, but for the one message that everybody may have."""
    allowance = Allowance(max_each_bytes=1000, max_total_bytes=1500)
    first, second = session_with(allowance, *[500] * 4), session_with(allowance, *[500] * 4)
    assert (sent(first), sent(second)) == (["r0", "r1"], ["r0"])
    first.acknowledge(["r0", "r0", "unknown"])
    assert (sent(second), allowance.used_bytes) == (["r1"], 1500)


def test_a_session_that_ends_gives_back_what_it_had():
    """Or the total would be used up by those who left."""
    allowance = Allowance(max_each_bytes=1000, max_total_bytes=1500)
    session = session_with(allowance, 400, 300)
    sent(session)
    assert session.end() == 0
    assert allowance.used_bytes == 0


def test_little_comes_again_to_a_client_that_acknowledges_nothing():
    """The first time everything, then one message, and everything again once something was acknowledged."""
    session = session_with(Allowance(10**9, 10**9), *[MAX_REPEATED_BYTES // 2] * 8)
    sent(session)
    assert len(session.overdue(CLAIM_S)) == 8
    assert session.overdue(2 * CLAIM_S) == ["r0", "r1"]
    session.acknowledge(["r5"])
    assert len(session.overdue(3 * CLAIM_S)) == 7


def test_everything_is_given_up_in_the_end():
    """Also what came again more seldom."""
    session = session_with(Allowance(10**9, 10**9), *[MAX_REPEATED_BYTES] * 4)
    sent(session)
    rounds = 0
    while session.claims:
        rounds += 1
        session.overdue(rounds * CLAIM_S)
    assert session.abandoned == 4
    assert MAX_TRIES < rounds <= 4 * MAX_TRIES
    assert session.allowance.used_bytes == 0
