"""What a person may see of the daemon beside its counts: one record, and for whom something is open."""

from collections.abc import Mapping

from mrl.exchange.entry import Entry
from mrl.exchange.sessions import Session
from mrl.exchange.shelf import PolicyRecords
from mrl.exchange.versions import VersionBook
from mrl.records.exchange_messages import ClientState, Peeked
from mrl.records.version import Version

MAX_SHOWN_CLIENTS = 256


def peeked(entry: Entry | None, versions: VersionBook, incarnation: str) -> Peeked:
    """The answer to a Peek."""
    if entry is None:
        return Peeked(incarnation=incarnation)
    age_versions = max(0, versions.age(entry.tags))
    return Peeked(incarnation=incarnation, body=bytes(entry.body), number=entry.number, age_versions=age_versions)


def client_states(sessions: Mapping[bytes, Session], parked: Mapping[bytes, int], now_s: float) -> list[ClientState]:
    """The clients for which most is open, then those that have been silent longest."""
    states = [
        ClientState(
            client=session.name,
            policy=session.policy,
            silent_s=max(0.0, now_s - session.heard_s),
            parked_puts=parked.get(client, 0),
            claims=len(session.claims),
            queued=session.num_queued,
        )
        for client, session in sessions.items()
    ]
    states.sort(key=lambda state: (-state.parked_puts, -state.claims - state.queued, -state.silent_s))
    return states[:MAX_SHOWN_CLIENTS]


def oldest_age_versions(held: PolicyRecords | None, newest: Version | None) -> int:
    """Steps between the oldest record that is held of a policy and its newest version; 0 without either."""
    if held is None or newest is None or not held.steps:
        return 0
    return max(0, newest.step - min(held.steps))
