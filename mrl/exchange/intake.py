"""Puts between their arrival and their acknowledgement: what is refused, and what is on its way to the log.

A record is acknowledged when the log has it, and not before: a repeated Put whose first copy is still on its way gets
no answer, its sender asks again. When the log cannot store at all, nothing is answered either, and nothing is lost.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mrl.errors import RecordError
from mrl.exchange.entry import Entry
from mrl.exchange.journal import Stored, stored_of
from mrl.exchange.kinds import OVERHEAD_BYTES
from mrl.exchange.sessions import remember
from mrl.exchange.shelf import Shelf
from mrl.exchange.stored_puts import StoredPuts
from mrl.exchange.versions import VersionBook
from mrl.records.codec import decode
from mrl.records.exchange_messages import Put
from mrl.records.experience import raw_pack_decoder
from mrl.records.packs import Pack
from mrl.records.tags import PackTags, Tags, tags_of

MAX_REMEMBERED_IDS = 32_768
MAX_UNDER_WAY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one Put."""

    client: bytes
    name: str
    seq: int
    entries: Sequence[Entry]
    """What is taken, numbered."""
    id_hashes: bytes
    """Of what is taken."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """How many records were not, by reason."""

    @property
    def num_records(self) -> int:
        """Records that are taken."""
        return sum(entry.count for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        """What is taken, as it counts against the budget."""
        return sum(entry.held_bytes for entry in self.entries)

    def stored(self) -> Stored:
        """What goes on the log before the arrays of the entries."""
        return stored_of(self.entries, client=self.name, seq=self.seq, id_hashes=self.id_hashes)


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
        self.stored = StoredPuts()
        self._shelf, self._versions, self._freed = shelf, versions, freed
        self._max_age_versions, self._keeps_all = max_age_versions, keeps_all
        self._under_way: dict[int, Verdict] = {}
        self._puts_under_way: set[tuple[str, int]] = set()
        self._ids_under_way: set[str] = set()
        self._bytes_under_way = 0
        self._earlier_under_way: dict[str, set[int]] = {}
        """Client -> numbers of Puts from before its last Hello."""
        self._remembered_ids: dict[str, None] = {}

    @property
    def num_under_way(self) -> int:
        """Puts on their way to the log."""
        return len(self._under_way)

    def is_under_way(self, name: str, seq: int) -> bool:
        """Whether the Put of this number of the client called `name` is on its way to the log."""
        return (name, seq) in self._puts_under_way

    def begin_life(self, name: str) -> None:
        """A client has said Hello: what it puts from now on may be what it had put before."""
        self.stored.begin_life(name)
        if earlier := {seq for owner, seq in self._puts_under_way if owner == name}:
            self._earlier_under_way[name] = earlier

    def judge(self, client: bytes, name: str, message: Put, policy: str) -> Verdict | None:
        """Which records of a client of `policy` are taken; None while some of them are, or may be, on their way."""
        if name in self._earlier_under_way:
            return None
        refused: Counter[str] = Counter()
        taken: list[Entry] = []
        ids: set[str] = set()
        hashes: list[bytes] = []
        for pack in self._new_packs(message.packs, name, refused):
            num_before = len(taken)
            for entry in self._entries_of(pack, policy, 2 * pack.num_bytes < message.num_bytes, refused):
                record_id = entry.record_id
                if record_id and record_id in self._ids_under_way:
                    return None
                if reason := "duplicate" if record_id and record_id in ids else self._refusal(entry, policy):
                    refused[reason] += entry.count
                    continue
                ids.add(record_id)
                taken.append(entry)
            hashes += [pack.id_hashes] if len(taken) > num_before else []
        self.refused.setdefault(policy, Counter()).update(refused)
        number = self._shelf.reserve_numbers(sum(entry.count for entry in taken))
        for entry in taken:
            entry.number, number = number, number + entry.count
        return Verdict(client, name, message.seq, taken, b"".join(hashes), refused)

    def has_room(self, message: Put) -> bool:
        """Whether records of this size may be sent off now: the log keeps up, and what is held leaves room for them."""
        if self._bytes_under_way and self._bytes_under_way + message.num_bytes > MAX_UNDER_WAY_BYTES:
            return False
        held = sum(pack.num_bytes + self._num_entries(pack) * OVERHEAD_BYTES for pack in message.packs)
        # What never fits would wait for ever, and all others behind it: it is judged, and refused or evicted by then.
        if not self._keeps_all or not self._shelf.fits(held - OVERHEAD_BYTES):
            return True
        return self._shelf.make_room(held + self._bytes_under_way, self._freed())

    def send_off(self, ticket: int, verdict: Verdict) -> None:
        """The verdict's records are on their way to the log."""
        self._under_way[ticket] = verdict
        self._puts_under_way.add((verdict.name, verdict.seq))
        self._ids_under_way.update(entry.record_id for entry in verdict.entries if entry.record_id)
        self._bytes_under_way += verdict.num_bytes

    def note_stored(self, verdict: Verdict) -> None:
        """The verdict's records are on the log, and are not stored again."""
        num_bytes = sum(entry.array_bytes for entry in verdict.entries)
        self.stored.note(verdict.name, verdict.seq, verdict.num_records, num_bytes, verdict.id_hashes)

    def settle(self, ticket: int) -> Verdict | None:
        """The log has dealt with this ticket; None when it was not that of a Put."""
        verdict = self._under_way.pop(ticket, None)
        if verdict is not None:
            self._puts_under_way.discard((verdict.name, verdict.seq))
            self._settle_earlier(verdict.name, verdict.seq)
            self._ids_under_way.difference_update(entry.record_id for entry in verdict.entries)
            self._bytes_under_way -= verdict.num_bytes
        return verdict

    def remember(self, record_ids: Iterable[str]) -> None:
        """These records have been stored once; they are refused from now on."""
        for record_id in record_ids:
            remember(self._remembered_ids, record_id, MAX_REMEMBERED_IDS)

    def remembered(self) -> list[str]:
        """The ids of what was stored last, the newest at the end."""
        return list(self._remembered_ids)

    def fault_of_age(self, tags: Tags | PackTags) -> str:
        """Why a record of these versions is of no use any more, or ""."""
        if self._versions.is_void(tags):
            return "void"
        return "stale" if self._versions.age(tags) > self._max_age_versions else ""

    def _settle_earlier(self, name: str, seq: int) -> None:
        earlier = self._earlier_under_way.get(name)
        if earlier is not None:
            earlier.discard(seq)
            if not earlier:
                del self._earlier_under_way[name]

    def _new_packs(self, packs: Iterable[Pack], name: str, refused: Counter[str]) -> Iterator[Pack]:
        """Packs that are what they say, without the records that an earlier life of the client has stored."""
        for pack in packs:
            if not pack.is_consistent:
                refused["invalid"] += pack.count
            elif (is_double := self.stored.doubles(name, pack.id_hashes)) is None:
                yield pack
            else:
                try:
                    new = pack.only(not double for double in is_double)
                except RecordError:
                    refused["invalid"] += pack.count
                    continue
                refused["duplicate"] += sum(is_double)
                yield from [new] if new is not None else []

    def _entries_of(self, pack: Pack, policy: str, is_part: bool, refused: Counter[str]) -> Iterator[Entry]:
        """The pack as one entry, or as many when its type is asked for one by one; `is_part` of something larger."""
        body = memoryview(pack.records)
        tags = PackTags(type=pack.type, source=policy, oldest=pack.oldest, newest=pack.newest, task=pack.task)
        # A small part would keep the whole message in memory.
        entry = Entry(tags, bytes(body) if is_part else body, 0, pack.count)
        if pack.type not in self._shelf.indexed:
            yield entry
            return
        singles = split(entry)
        if len(singles) < pack.count:
            refused["invalid"] += pack.count - len(singles)
        yield from singles[: pack.count]

    def _num_entries(self, pack: Pack) -> int:
        return pack.count if pack.type in self._shelf.indexed else 1

    def _refusal(self, entry: Entry, policy: str) -> str:
        if entry.tags.source != policy:
            return "foreign"
        record_id = entry.record_id
        if record_id and (record_id in self._remembered_ids or record_id in self._shelf):
            return "duplicate"
        return self.fault_of_age(entry.tags) or ("" if self._shelf.fits(len(entry.body)) else "too_large")


def split(entry: Entry) -> list[Entry]:
    """The records of a pack as single entries with their numbers, without those whose tags are not what they should be.

    The records of another source are among them.
    """
    try:
        raws = decode(entry.body, raw_pack_decoder, max_bytes=len(entry.body))
    except RecordError:
        return []
    found = []
    for number, raw in enumerate(raws, entry.number):
        body = bytes(raw)
        tags = tags_of(body)
        if tags is not None and tags.type == entry.tags.type:
            found.append(Entry(tags, body, number, 1, entry.offset))
    return found
