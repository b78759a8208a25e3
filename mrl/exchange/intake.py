"""Puts between their arrival and their acknowledgement: what is refused, and what is on its way to the log.

A record is acknowledged when the log has it, and not before: a repeated Put whose first copy is still on its way gets
no answer, its sender asks again. When the log cannot store at all, nothing is answered either, and nothing is lost.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mrl.exchange.kinds import OVERHEAD_BYTES
from mrl.exchange.sessions import remember
from mrl.exchange.shelf import Shelf
from mrl.exchange.versions import VersionBook
from mrl.records.exchange import Put
from mrl.records.tags import Tags, tags_of

MAX_REMEMBERED_IDS = 32_768
MAX_UNDER_WAY_BYTES = 64 * 1024 * 1024

Record = tuple[Tags, bytes]
"""A record's tags and its encoded form."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one Put."""

    client: bytes
    seq: int
    records: Sequence[Record]
    """What is taken."""
    first_number: int
    """Of its first record; the others follow."""
    refused: Mapping[str, int]
    """How many records were not, by reason."""


class Intake:
    """Judges Puts, and keeps those that the log does not have yet."""

    def __init__(
        self, shelf: Shelf, versions: VersionBook, freed: Callable[[], int], *, max_age_versions: int, keeps_all: bool
    ) -> None:
        """`freed()`: the number up to which all streams have committed. `keeps_all`: nothing else makes room."""
        self.put: Counter[str] = Counter()
        """Records taken, by source."""
        self.refused: dict[str, Counter[str]] = {}
        """Records refused, by the policy of the client and by reason."""
        self.storage = ""
        """Why the log stores nothing at the moment; "" when it does."""
        self._shelf, self._versions, self._freed = shelf, versions, freed
        self._max_age_versions, self._keeps_all = max_age_versions, keeps_all
        self._under_way: dict[int, Verdict] = {}
        self._ids_under_way: set[str] = set()
        self._bytes_under_way = 0
        self._remembered_ids: dict[str, None] = {}

    @property
    def num_under_way(self) -> int:
        """Puts on their way to the log."""
        return len(self._under_way)

    def judge(self, client: bytes, message: Put, policy: str) -> Verdict | None:
        """Which records of a client of `policy` are taken; None while some of them are on their way."""
        refused: Counter[str] = Counter()
        taken: dict[str, Record] = {}
        for body in map(bytes, message.records):
            tags = tags_of(body)
            if tags is None:
                refused["invalid"] += 1
            elif tags.record_id in self._ids_under_way:
                return None
            elif reason := "duplicate" if tags.record_id in taken else self._refusal(tags, len(body), policy):
                refused[reason] += 1
            else:
                taken[tags.record_id] = tags, body
        self.refused.setdefault(policy, Counter()).update(refused)
        first_number = self._shelf.reserve_numbers(len(taken))
        return Verdict(client, message.seq, list(taken.values()), first_number, refused)

    def has_room(self, message: Put) -> bool:
        """Whether records of this size may be sent off now: the log keeps up, and what is held leaves room for them."""
        num_bytes = sum(len(memoryview(body)) + OVERHEAD_BYTES for body in message.records)
        if self._bytes_under_way > MAX_UNDER_WAY_BYTES:
            return False
        return not self._keeps_all or self._shelf.make_room(num_bytes + self._bytes_under_way, self._freed())

    def send_off(self, ticket: int, verdict: Verdict) -> None:
        """The verdict's records are on their way to the log."""
        self._under_way[ticket] = verdict
        self._ids_under_way.update(tags.record_id for tags, _ in verdict.records)
        self._bytes_under_way += _num_bytes(verdict)

    def settle(self, ticket: int) -> Verdict | None:
        """The log has dealt with this ticket; None when it was not that of a Put."""
        verdict = self._under_way.pop(ticket, None)
        if verdict is not None:
            self._ids_under_way.difference_update(tags.record_id for tags, _ in verdict.records)
            self._bytes_under_way -= _num_bytes(verdict)
        return verdict

    def remember(self, record_ids: Iterable[str]) -> None:
        """These records have been stored once; they are refused from now on."""
        for record_id in record_ids:
            remember(self._remembered_ids, record_id, MAX_REMEMBERED_IDS)

    def remembered(self) -> list[str]:
        """The ids of what was stored last, the newest at the end."""
        return list(self._remembered_ids)

    def fault_of_age(self, tags: Tags) -> str:
        """Why a record of these versions is of no use any more, or ""."""
        if self._versions.is_void(tags):
            return "void"
        return "stale" if self._versions.age(tags) > self._max_age_versions else ""

    def _refusal(self, tags: Tags, num_bytes: int, policy: str) -> str:
        if tags.source != policy:
            return "foreign"
        if tags.record_id in self._remembered_ids or tags.record_id in self._shelf:
            return "duplicate"
        return self.fault_of_age(tags) or ("" if self._shelf.fits(num_bytes) else "too_large")


def _num_bytes(verdict: Verdict) -> int:
    return sum(len(body) + OVERHEAD_BYTES for _, body in verdict.records)
