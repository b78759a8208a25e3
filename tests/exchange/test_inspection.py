"""What the daemon says of itself: who waits, how old what it holds is, and what flows."""

import pytest

from mrl.exchange.exchange_stats import MAX_SHOWN_CLIENTS, client_states
from mrl.exchange.limits import Limits
from mrl.exchange.sessions import Allowance, Session, Shipment
from mrl.records.exchange_messages import Announce, Fetch, Hello
from mrl.records.version import Version
from tests.support.stored_core import StoredCore, put_message


@pytest.fixture
def core():
    """One that knows a client of each of two policies."""
    core = StoredCore()
    for policy in ("qwen", "llama"):
        core.handle(policy.encode(), Hello(client=f"worker/{policy}/0", policy=policy), 0.0)
    return core


def test_the_account_says_for_whom_something_is_open(core, outcome):
    """Unacknowledged deliveries first, then who was silent longest."""
    core.handle(b"qwen", put_message(outcome("r1")), 1.0)
    fetch = Fetch(client="l", policy="llama", prompt_ids=["p1"], limit=4, max_age_versions=None, watch=False, seq=1)
    core.handle(b"llama", fetch, 4.0)
    first, second = core.stat(5.0).sessions
    assert (first.client, first.policy, first.silent_s, first.unacknowledged) == ("llama", "llama", 1.0, 1)
    assert (second.client, second.silent_s, second.unacknowledged) == ("qwen", 4.0, 0)


def session_of(name, heard_s):
    """A client of policy a."""
    return Session(name, "a", heard_s, Limits(), Allowance())


def test_records_that_wait_for_acknowledgements_are_counted():
    """Those of a shipment that was queued and not sent."""
    session = session_of("learner/a", 0.0)
    session.queue([Shipment([1, 2], 20)])
    [state] = client_states({b"a": session}, 0.0)
    assert (state.queued, state.unacknowledged) == (2, 0)


def test_the_clients_shown_are_bounded():
    """Those that were heard most recently are left out."""
    sessions = {str(n).encode(): session_of(str(n), float(n)) for n in range(MAX_SHOWN_CLIENTS + 5)}
    shown = client_states(sessions, 1000.0)
    assert [state.client for state in shown] == [str(n) for n in range(MAX_SHOWN_CLIENTS)]


def test_the_age_of_the_oldest_record_follows_the_announcements(core, outcome):
    """In versions; a policy that holds nothing has none."""
    core.handle(b"qwen", put_message(outcome("r1", step=3), outcome("r2", prompt_id="p2", step=5)), 0.0)
    core.handle(b"qwen", Announce(client="w", policy="qwen", version=Version(0, 10)), 0.0)
    ages = {policy_stat.policy: policy_stat.oldest_age_versions for policy_stat in core.stat(0.0).policies}
    assert ages == {"qwen": 7, "llama": 0}


def test_the_ages_of_what_flows_add_up(core, outcome):
    """Their sum over the records is the mean that is shown beside them."""
    core.handle(b"qwen", Announce(client="w", policy="qwen", version=Version(0, 4)), 0.0)
    core.handle(b"qwen", put_message(outcome("r1", step=3), outcome("r2", step=1)), 0.0)
    fetch = Fetch(client="l", policy="llama", prompt_ids=["p1"], limit=4, max_age_versions=None, watch=False, seq=1)
    core.handle(b"llama", fetch, 0.0)
    [flow] = [flow for flow in core.stat(0.0).flows if flow.receiver == "llama"]
    assert (flow.records, flow.ages_versions, flow.mean_age_versions) == (2, 4, 2.0)
