"""What the daemon remembers about one client: who it is, what it asked, what it was given and has not acknowledged."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

FORGET_AFTER_S = 60.0
CLAIM_S = 3.0
MAX_TRIES = 5
MAX_CLAIMS = 4096
MAX_REMEMBERED_FETCHES = 1024

K = TypeVar("K")


def remember(remembered: dict[K, None], key: K, limit: int) -> None:
    """Remember the newest `limit` keys."""
    remembered[key] = None
    if len(remembered) > limit:
        del remembered[next(iter(remembered))]


@dataclass(slots=True)
class _Claim:
    """A record that the client was given and has not acknowledged."""

    due_s: float
    tries: int


@dataclass(slots=True)
class Session:
    """One client that said Hello."""

    name: str
    policy: str
    heard_s: float
    abandoned: int = 0
    """Deliveries given up: too many tries, or too many at once."""
    claims: dict[str, _Claim] = field(default_factory=dict)
    """By record id, in order of `due_s`."""
    _fetches: dict[int, None] = field(default_factory=dict)

    def is_silent(self, now_s: float) -> bool:
        """Whether nothing was heard for so long that the client can be forgotten; living clients ping every second."""
        return now_s - self.heard_s > FORGET_AFTER_S

    def is_new_fetch(self, seq: int) -> bool:
        """Whether this Fetch comes for the first time, and note it. Without a number each one is new."""
        is_new = seq == 0 or seq not in self._fetches
        remember(self._fetches, seq, MAX_REMEMBERED_FETCHES)
        return is_new

    def claim(self, record_id: str, now_s: float, *, tries: int = 1) -> None:
        """Expect an acknowledgement of this record until `CLAIM_S` from now."""
        self.claims.pop(record_id, None)
        self.claims[record_id] = _Claim(now_s + CLAIM_S, tries)
        if len(self.claims) > MAX_CLAIMS:
            del self.claims[next(iter(self.claims))]
            self.abandoned += 1

    def acknowledge(self, record_ids: Iterable[str]) -> None:
        """The client has taken these records over."""
        for record_id in record_ids:
            self.claims.pop(record_id, None)

    def overdue(self, now_s: float) -> list[str]:
        """Records to deliver again, their claims renewed; those tried often enough are given up."""
        due = list(takewhile(lambda item: item[1].due_s <= now_s, self.claims.items()))
        for record_id, claim in due:
            if claim.tries < MAX_TRIES:
                self.claim(record_id, now_s, tries=claim.tries + 1)
            else:
                del self.claims[record_id]
                self.abandoned += 1
        return [record_id for record_id, claim in due if claim.tries < MAX_TRIES]
