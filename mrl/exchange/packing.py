"""Records on their way into Puts: encoded one behind the other, in packs of equal tags, up to a bounded size.

What is published while an earlier Put is unanswered is gathered into a larger one: the less often the daemon answers,
the more each of its answers covers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from xxhash import xxh3_64_digest

from mrl.records.codec import MAX_MESSAGE_BYTES, MIN_TOGETHER, append_all_encoded, append_encoded
from mrl.records.experience import ExperienceRecord, RecordKind, kind_of
from mrl.records.packs import ARRAY_32, ARRAY_HEAD, MAX_PACK_RECORDS, MAX_PUT_PACKS, Pack
from mrl.records.version import Version

ENVELOPE_BYTES = 1024
"""What a message holds beside its packs, and a pack beside its records, at most."""
MAX_RECORD_BYTES = MAX_MESSAGE_BYTES - 2 * ENVELOPE_BYTES
FULL_BYTES = 1024 * 1024
"""A Put of this length waits for nothing more."""

MAX_ALIKE_BYTES = FULL_BYTES + FULL_BYTES // 4
"""What records that are taken at once may make of a Put; one by one they fill it better."""


@dataclass(slots=True)
class OpenPack:
    """Records of one type, age and task, as an array that still grows."""

    record_type: type[ExperienceRecord]
    kind: RecordKind
    oldest: Version
    newest: Version
    task: str
    id_hashes: list[bytes] = field(default_factory=list)
    last_bytes: int = 1
    """Length of the record that was appended last alone."""
    array: bytearray = field(default_factory=lambda: bytearray(ARRAY_HEAD.size))

    @classmethod
    def of(cls, record: ExperienceRecord) -> "OpenPack":
        """An empty pack for records like this one."""
        return cls(type(record), kind_of(record), record.oldest, record.newest, record.task)

    @property
    def count(self) -> int:
        """Records in it."""
        return len(self.id_hashes)

    def takes(self, record: ExperienceRecord) -> bool:
        """Whether the record has the tags of the pack, and there is room for one more."""
        return self.count < MAX_PACK_RECORDS and self.num_alike([record]) == 1

    def num_alike(self, records: Iterable[ExperienceRecord]) -> int:
        """How many of these, from the first on, have the tags of the pack."""
        kind, oldest, newest, task, alike = self.record_type, self.oldest, self.newest, self.task, 0
        for record in records:
            # Records of one call mostly share their versions, and to compare them costs more than all else here.
            if not (
                type(record) is kind
                and (record.newest is newest or record.newest == newest)
                and (record.oldest is oldest or record.oldest == oldest)
                and record.task == task
            ):
                break
            alike += 1
        return alike

    def append(self, record: ExperienceRecord) -> int:
        """Encode the record behind the others; returns its length."""
        before = len(self.array)
        append_encoded(record, self.array)
        self.id_hashes.append(xxh3_64_digest(record.record_id.encode()))
        self.last_bytes = len(self.array) - before
        return self.last_bytes

    def append_all(self, records: Sequence[ExperienceRecord]) -> int:
        """The same for many records at once."""
        before = len(self.array)
        append_all_encoded(records, self.array)
        # At once, while they are in the processor's cache.
        self.id_hashes += [xxh3_64_digest(record.record_id.encode()) for record in records]
        return len(self.array) - before

    def drop_last(self, num_bytes: int, count: int = 1) -> None:
        """Take back the last records, which have this length."""
        del self.array[len(self.array) - num_bytes :]
        del self.id_hashes[self.count - count :]

    def seal(self) -> bytearray:
        """The array; nothing more comes."""
        ARRAY_HEAD.pack_into(self.array, 0, ARRAY_32, self.count)
        return self.array

    def head(self) -> Pack:
        """What the daemon has to know of it."""
        return Pack(
            type=self.kind,
            oldest=self.oldest,
            newest=self.newest,
            task=self.task,
            count=self.count,
            num_bytes=len(self.array),
            id_hashes=b"".join(self.id_hashes),
        )


class OpenPut:
    """The packs of a Put that is not sent yet."""

    def __init__(self) -> None:
        self.num_bytes = self.num_records = 0
        self._packs: list[OpenPack] = []

    @property
    def is_full(self) -> bool:
        """Whether it is time to send."""
        return self.num_bytes >= FULL_BYTES or len(self._packs) == MAX_PUT_PACKS

    def add(self, record: ExperienceRecord) -> Literal["taken", "no_room", "too_large"]:
        """Take one more record, if it fits beside the others; "too_large" is what no Put can hold."""
        pack = self._packs[-1] if self._packs else None
        if pack is None or not pack.takes(record):
            pack = OpenPack.of(record)
        num_bytes = pack.append(record)
        if self.num_bytes + num_bytes > MAX_RECORD_BYTES:
            pack.drop_last(num_bytes)
            return "too_large" if num_bytes > MAX_RECORD_BYTES else "no_room"
        if pack.count == 1:
            self._packs.append(pack)
            self.num_bytes += ENVELOPE_BYTES
        self.num_bytes += num_bytes
        self.num_records += 1
        return "taken"

    def add_alike(self, records: Sequence[ExperienceRecord], begin: int) -> int:
        """Take records from `begin` on that are like the last one taken, many at once; returns how many."""
        pack = self._packs[-1]
        room = min((FULL_BYTES - self.num_bytes) // pack.last_bytes, MAX_PACK_RECORDS - pack.count)
        candidates = records[begin : begin + max(0, room)]
        alike = candidates[: pack.num_alike(candidates)]
        if len(alike) < MIN_TOGETHER:
            return 0
        num_bytes = pack.append_all(alike)
        if self.num_bytes + num_bytes > MAX_ALIKE_BYTES:  # they are longer than the last one
            pack.drop_last(num_bytes, len(alike))
            return 0
        self.num_bytes += num_bytes
        self.num_records += len(alike)
        return len(alike)

    def sealed(self) -> tuple[list[Pack], list[bytearray]]:
        """Heads and arrays of its packs; nothing more comes."""
        return [pack.head() for pack in self._packs], [pack.seal() for pack in self._packs]
