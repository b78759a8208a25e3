"""The daemon's account of itself: the counts and states that `mrl inspect` and the metrics page show."""

from collections import Counter
from collections.abc import Iterable, Mapping

from mrl.exchange.barriers import Barriers
from mrl.exchange.record_index import PolicyRecords, RecordIndex
from mrl.exchange.sessions import Session
from mrl.exchange.versions import VersionTracker
from mrl.exchange.watches import Watches
from mrl.records.exchange_messages import ClientState, PolicyStat
from mrl.records.version import Version

MAX_SHOWN_CLIENTS = 256
"""Clients that an account lists."""
SERVED = "served"
"""The only reason for a removal that does not count as an eviction."""


class ExchangeStats:
    """Counts of records by policy over all lives of the daemon, and the state of every policy."""

    def __init__(self, index: RecordIndex, versions: VersionTracker, watches: Watches, barriers: Barriers) -> None:
        self._index, self._versions, self._watches, self._barriers = index, versions, watches, barriers
        self._counts: dict[str, dict[str, Counter[str]]] = {}
        """Policy -> "stored", "refused" or "removed" -> reason -> number of records."""

    def note(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        """Add the counts of one or more transactions, in the form of `Transaction.counts`."""
        for (policy, what, reason), number in counts.items():
            self._counts.setdefault(policy, {}).setdefault(what, Counter())[reason] += number

    def policies(self, policies: Iterable[str]) -> list[PolicyStat]:
        """Return all that is known of each of these policies, in the order of their names."""
        watched = self._watches.num_prompts()
        return [self._policy_stat(policy, watched[policy]) for policy in sorted(policies)]

    def _policy_stat(self, policy: str, watched_prompts: int) -> PolicyStat:
        held, newest = self._index.policies.get(policy, PolicyRecords()), self._versions.newest.get(policy)
        counts = self._counts.get(policy, {})
        removed = counts.get("removed", Counter())
        return PolicyStat(
            policy=policy,
            newest=newest,
            prompts=held.num_prompts,
            records=held.kinds.total(),
            bytes=held.held_bytes,
            put=counts.get("stored", Counter())[""],
            refused=dict(counts.get("refused", {})),
            evicted={reason: number for reason, number in removed.items() if reason != SERVED},
            watched_prompts=watched_prompts,
            kinds={kind: number for kind, number in held.kinds.items() if number},
            barrier=self._barriers.reached(policy),
            oldest_age_versions=_oldest_age_versions(held, newest),
        )


def client_states(sessions: Mapping[bytes, Session], now_s: float) -> list[ClientState]:
    """Return the states of at most MAX_SHOWN_CLIENTS clients.

    Clients with the most records unacknowledged or queued come first, then those that have been silent longest.
    """
    states = [
        ClientState(
            client=session.name,
            policy=session.policy,
            silent_s=max(0.0, now_s - session.heard_s),
            unacknowledged=session.num_unacknowledged,
            queued=session.num_queued,
        )
        for session in sessions.values()
    ]
    states.sort(key=lambda state: (-state.unacknowledged - state.queued, -state.silent_s))
    return states[:MAX_SHOWN_CLIENTS]


def _oldest_age_versions(held: PolicyRecords, newest: Version | None) -> int:
    """Return the steps between the oldest record held of a policy and its newest version; 0 without either."""
    return max(0, newest.step - min(held.steps)) if newest is not None and held.steps else 0
