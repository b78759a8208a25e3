"""What the admin alone may ask of the daemon: one record, who waits, and to take no more Puts."""

import pytest
from logged_core import LoggedCore, put_message

from mrl.exchange.core import ExchangeCore
from mrl.exchange.inspection import MAX_SHOWN_CLIENTS, client_states
from mrl.exchange.sessions import Session, Shipment
from mrl.records.codec import encode
from mrl.records.exchange_messages import (
    Announce,
    Drain,
    Fetch,
    Hello,
    Peek,
    Peeked,
    Ping,
    PutAck,
    Stat,
    Stream,
    Took,
    Welcome,
)
from mrl.records.version import Version
from mrl.transport.grants import Grant

ADMIN = Grant("admin")
OTHERS = [Grant("worker", "qwen"), Grant("learner", "qwen"), Grant("supervisor")]


def ask(core, message, grant=ADMIN, now_s=0.0):
    """The messages that a client with this key is answered."""
    return [answer for _, answer in ExchangeCore.handle(core, b"admin/1", message, grant, now_s)]


@pytest.fixture
def core():
    """One that knows a client of each of two policies."""
    core = LoggedCore()
    for policy in ("qwen", "llama"):
        core.handle(policy.encode(), Hello(client=f"worker/{policy}/0", policy=policy), 0.0)
    return core


def test_a_held_record_is_shown_as_it_came(core, outcome):
    """With its place and its age in versions; one that is not held has no body."""
    core.handle(b"qwen", put_message(outcome("r1"), outcome("r2", prompt_id="p2")), 0.0)
    core.handle(b"qwen", Announce(client="w", policy="qwen", version=Version(0, 7)), 0.0)
    [shown] = ask(core, Peek(client="a", record_id="r2"))
    assert shown == Peeked(incarnation="one", body=encode(outcome("r2", prompt_id="p2")), number=2, age_versions=7)
    assert ask(core, Peek(client="a", record_id="r3")) == [Peeked(incarnation="one")]


@pytest.mark.parametrize("grant", OTHERS, ids=lambda grant: grant.role)
def test_only_the_admin_peeks_and_drains(core, outcome, grant):
    """Anybody else gets no answer, and nothing changes."""
    core.handle(b"qwen", put_message(outcome("r1")), 0.0)
    assert ask(core, Peek(client="a", record_id="r1"), grant) == []
    assert ask(core, Drain(client="a", is_on=True), grant) == []
    assert core.stat(0.0).storage == ""


def test_a_draining_daemon_takes_no_put_and_goes_on_delivering(core, outcome):
    """What was put before reaches its stream; a new Put is answered with a window of 0, and is taken afterwards."""
    core.handle(b"qwen", put_message(outcome("r1"), seq=1), 0.0)
    [stat] = ask(core, Drain(client="a", is_on=True))
    assert isinstance(stat, Stat)
    assert stat.storage == "draining"
    [(_, refused)] = core.handle(b"qwen", put_message(outcome("r2"), seq=2), 0.0)
    assert refused == Welcome(
        incarnation="one", max_put_bytes=refused.max_put_bytes, window_bytes=0, known=True, storage="draining"
    )
    [(_, batch)] = core.handle(b"llama", Stream(client="l", stream="all", kinds=["outcome"]), 0.0)
    assert sum(parcel.count for parcel in batch.parcels) == 1
    fetch = Fetch(client="l", policy="llama", prompt_ids=["p1"], limit=4, max_age_versions=None, watch=False, seq=1)
    [(_, delivered)] = core.handle(b"llama", fetch, 0.0)
    assert len(delivered.records) == 1
    [stat] = ask(core, Drain(client="a", is_on=False))
    assert stat.storage == ""
    (_, ack), *_ = core.handle(b"qwen", put_message(outcome("r2"), seq=2), 0.0)
    assert (type(ack), ack.stored) == (PutAck, 1)
    assert ack.window_bytes > 0


def test_a_client_that_the_draining_daemon_does_not_know_is_told_so(core, outcome):
    """It has to say Hello first, as always."""
    ask(core, Drain(client="a", is_on=True))
    [(_, welcome)] = core.handle(b"gemma", put_message(outcome("r1")), 0.0)
    assert not welcome.known
    [(_, welcome)] = core.handle(b"qwen", Ping(client="w"), 0.0)
    assert (welcome.known, welcome.window_bytes, welcome.storage) == (True, 0, "draining")


def test_a_full_disk_is_named_before_the_drain(outcome):
    """It is the reason that a person has to do something about."""
    failures = ["disk_full"]
    core = LoggedCore(failure=lambda: failures[0])
    core.handle(b"qwen", Hello(client="w", policy="qwen"), 0.0)
    core.handle(b"qwen", put_message(outcome("r1")), 0.0)
    [stat] = ask(core, Drain(client="a", is_on=True))
    assert stat.storage == "disk_full"


def test_the_account_says_for_whom_something_is_open(core, outcome):
    """Unacknowledged deliveries first, then who was silent longest."""
    core.handle(b"qwen", put_message(outcome("r1")), 1.0)
    fetch = Fetch(client="l", policy="llama", prompt_ids=["p1"], limit=4, max_age_versions=None, watch=False, seq=1)
    core.handle(b"llama", fetch, 4.0)
    first, second = core.stat(5.0).sessions
    assert (first.client, first.policy, first.silent_s, first.claims) == ("llama", "llama", 1.0, 1)
    assert (second.client, second.silent_s, second.claims, second.parked_puts) == ("qwen", 4.0, 0, 0)


def test_parked_puts_are_shown_with_their_client(outcome):
    """A daemon without room parks what comes until a reader has committed something."""
    core = LoggedCore(budget_bytes=3000, when_full="refuse")
    for policy in ("qwen", "llama"):
        core.handle(policy.encode(), Hello(client=policy, policy=policy), 0.0)
    core.handle(b"llama", Stream(client="l", stream="all", kinds=["outcome"]), 0.0)
    for number in range(8):
        record = outcome(f"r{number}", prompt_id=f"p{number}", completion=bytes(500))
        core.handle(b"qwen", put_message(record, seq=number + 1), 0.0)
    stat = core.stat(0.0)
    assert stat.parked == stat.unstored > 0
    assert [(state.client, state.parked_puts) for state in stat.sessions] == [("qwen", stat.parked), ("llama", 0)]


def test_records_that_wait_for_acknowledgements_are_counted():
    """Those of a parcel that was queued and not sent."""
    session = Session("learner/a", "a", 0.0)
    session.queue([Shipment({"r1": 10, "r2": 10})])
    [state] = client_states({b"a": session}, {}, 0.0)
    assert (state.queued, state.claims) == (2, 0)


def test_the_clients_shown_are_bounded():
    """Those that were heard most recently are left out."""
    sessions = {str(n).encode(): Session(str(n), "a", float(n)) for n in range(MAX_SHOWN_CLIENTS + 5)}
    shown = client_states(sessions, {}, 1000.0)
    assert [state.client for state in shown] == [str(n) for n in range(MAX_SHOWN_CLIENTS)]


def test_the_age_of_the_oldest_record_follows_the_announcements(core, outcome):
    """In versions; a policy that holds nothing has none."""
    core.handle(b"qwen", put_message(outcome("r1", step=3), outcome("r2", prompt_id="p2", step=5)), 0.0)
    core.handle(b"qwen", Announce(client="w", policy="qwen", version=Version(0, 10)), 0.0)
    ages = {shelf.policy: shelf.oldest_age_versions for shelf in core.stat(0.0).shelves}
    assert ages == {"qwen": 7, "llama": 0}


def test_the_ages_of_what_flows_add_up(core, outcome):
    """Their sum over the records is the mean that is shown beside them."""
    core.handle(b"qwen", Announce(client="w", policy="qwen", version=Version(0, 4)), 0.0)
    core.handle(b"qwen", put_message(outcome("r1", step=3), outcome("r2", step=1)), 0.0)
    fetch = Fetch(client="l", policy="llama", prompt_ids=["p1"], limit=4, max_age_versions=None, watch=False, seq=1)
    core.handle(b"llama", fetch, 0.0)
    [flow] = [flow for flow in core.stat(0.0).flows if flow.receiver == "llama"]
    assert (flow.records, flow.ages_versions, flow.mean_age_versions) == (2, 4, 2.0)


def test_a_drained_stream_has_taken_all_that_it_was_sent(core, outcome):
    """What the tool waits for: nothing sent that is not taken, nothing held behind it."""
    core.handle(b"qwen", put_message(outcome("r1")), 0.0)
    ask(core, Drain(client="a", is_on=True))
    core.handle(b"llama", Stream(client="l", stream="all", kinds=["outcome"]), 0.0)
    [state] = core.stat(0.0).streams
    assert (state.sent, state.took, state.waiting) == (1, 0, 0)
    core.handle(b"llama", Took(client="l", stream="all", upto=1), 0.0)
    [state] = core.stat(0.0).streams
    assert (state.sent, state.took) == (1, 1)
