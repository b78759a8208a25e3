"""One thing that the exchange holds: a record of its own, or a pack of records that nobody has asked for one by one."""

from dataclasses import dataclass

from mrl.exchange.kinds import OVERHEAD_BYTES
from mrl.records.codec import Buffer
from mrl.records.tags import PackTags, Tags

ARRAY_OF_ONE = b"\x91"
"""What msgpack writes before the only element of an array."""


@dataclass(slots=True, eq=False)
class Entry:
    """What is held as one: it comes, ages and goes as one."""

    tags: Tags | PackTags
    """Of a single record, or what the records of a pack have in common."""
    body: Buffer
    """A record as its source encoded it, or an array of them."""
    number: int
    """Of its (first) record: numbers follow the order in which records came, once and for all."""
    count: int = 1
    """Records."""
    offset: int = 0
    """Of the entry on the log that holds it."""
    place: int = 0
    """Where on the log its records lie, as an array."""

    @property
    def last_number(self) -> int:
        """Of its last record."""
        return self.number + self.count - 1

    @property
    def own_tags(self) -> Tags:
        """Of a single record. Raises TypeError for a pack."""
        if isinstance(self.tags, Tags):
            return self.tags
        raise TypeError("a pack of records has no tags of one")

    @property
    def record_id(self) -> str:
        """Of a single record; "" for a pack."""
        return self.tags.record_id if isinstance(self.tags, Tags) else ""

    @property
    def array(self) -> tuple[Buffer, ...]:
        """Its records as an array, in parts that belong together."""
        return (ARRAY_OF_ONE, self.body) if isinstance(self.tags, Tags) else (self.body,)

    @property
    def array_bytes(self) -> int:
        """Length of `array`."""
        return len(self.body) + isinstance(self.tags, Tags)

    @property
    def held_bytes(self) -> int:
        """What the entry counts against the budget."""
        return len(self.body) + OVERHEAD_BYTES

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sorts newest first."""
        oldest = self.tags.oldest
        return -oldest.run_epoch, -oldest.step, -self.number
