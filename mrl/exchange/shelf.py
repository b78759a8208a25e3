"""What is held: per record type, policy and prompt the newest records, within a byte budget.

Records come in packs and stay in them until somebody asks for records of their type by prompt or id. From then on each
record of the type is an entry of its own, and counts against the quota of its prompt. A reader of streams alone asks
for neither: what it reads costs the daemon as much per pack as another record does.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from mrl.exchange.arrival_order import ArrivalOrder
from mrl.exchange.entry import Entry
from mrl.exchange.kinds import ALWAYS_INDEXED, OVERHEAD_BYTES
from mrl.records.experience import RecordKind
from mrl.records.tags import PackTags, Tags

MAX_NUMBER = 2**52
"""Higher ones are nobody's honest claim; numbers on the wire end at 2**53."""


@dataclass(slots=True)
class PolicyRecords:
    """What is held of one policy."""

    num_prompts: int = 0
    """Prompts with single records."""
    steps: dict[int, dict[int, Entry]] = field(default_factory=dict)
    """Entries by the step of their oldest version, so that stale ones are found without a search."""
    kinds: Counter[RecordKind] = field(default_factory=Counter)
    """How many records of each type."""
    held_bytes: int = 0
    evicted: Counter[str] = field(default_factory=Counter)


class Shelf:
    """The newest records of every type, policy and prompt; beyond `budget_bytes` the oldest arrivals go."""

    def __init__(
        self,
        *,
        quotas: Mapping[RecordKind, int],
        budget_bytes: int,
        on_removal: Callable[[str], None] = lambda record_id: None,
    ) -> None:
        """`quotas`: records per type, policy and prompt. `on_removal(record_id)` is told of single ones that leave."""
        self.policies: dict[str, PolicyRecords] = {}
        self.indexed: set[RecordKind] = {*ALWAYS_INDEXED}
        """Types whose records are held one by one."""
        self.used_bytes = 0
        self.body_bytes = 0
        self._quotas, self._budget_bytes, self._on_removal = quotas, budget_bytes, on_removal
        self._by_id: dict[str, Entry] = {}
        self._prompts: dict[str, dict[str, list[Entry]]] = {}
        """Prompt -> policy -> its single records, newest first."""
        self._in_order = ArrivalOrder()
        self._on_log: dict[int, Entry] = {}
        """By number, in the order of their places on the log."""
        self._num_records = 0
        self.last_number = 0
        """Of all records that ever came."""

    def __len__(self) -> int:
        return self._num_records

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._by_id

    @property
    def first_offset(self) -> int | None:
        """Where the log begins to matter; None when nothing is held."""
        return next((entry.offset for entry in self._on_log.values()), None)

    def fits(self, num_bytes: int) -> bool:
        """Whether an entry of this encoded size can be held at all."""
        return num_bytes + OVERHEAD_BYTES <= self._budget_bytes

    def get(self, record_id: str) -> Entry | None:
        """The single record of this id, if it is still held."""
        return self._by_id.get(record_id)

    def holds(self, number: int) -> bool:
        """Whether an entry that begins with this number is held."""
        return number in self._on_log

    def add(self, entry: Entry) -> None:
        """Hold what is not held yet, evicting what it displaces. Without a number it gets the next one."""
        entry.number = entry.number or self.last_number + 1
        self.last_number = max(self.last_number, entry.last_number)
        self._on_log[entry.number] = entry
        self._in_order.add(entry)
        self._enter(entry)
        while self.used_bytes > self._budget_bytes:
            self.evict(next(self._in_order.after(0)), "full")

    def index(self, kind: RecordKind, split: Callable[[Entry], list[Entry]]) -> None:
        """Hold all records of a type one by one from now on; `split` makes single ones of a pack, with its numbers."""
        if kind in self.indexed:
            return
        self.indexed.add(kind)
        packs = [entry for entry in self._on_log.values() if entry.tags.type == kind]
        parts = {entry.number: split(entry) for entry in packs}
        self._in_order.split(parts)
        held = list(self._on_log.values())
        self._on_log = {one.number: one for entry in held for one in parts.get(entry.number, [entry])}
        for entry in packs:
            self._leave(entry)
        for one in (one for entry in packs for one in parts[entry.number]):
            self._enter(one)
        while self.used_bytes > self._budget_bytes:
            self.evict(next(self._in_order.after(0)), "full")

    def make_room(self, num_bytes: int, freed: int) -> bool:
        """Let go of records that nobody needs, those up to number `freed`, until so many bytes fit beside the rest."""
        while self.used_bytes + num_bytes > self._budget_bytes:
            oldest = next(self._in_order.after(0), None)
            if oldest is None or oldest.last_number > freed:
                return False
            self._remove(oldest)
        return True

    def on_prompt(self, prompt_id: str, kinds: Collection[RecordKind], *, of_others_than: str) -> Iterator[Entry]:
        """What the other policies have on a prompt; newest first within a policy. Of indexed types only."""
        for policy, held in self._prompts.get(prompt_id, {}).items():
            if policy != of_others_than:
                yield from (entry for entry in held if entry.tags.type in kinds)

    def remove(self, record_id: str) -> None:
        """Let go of a record that has served its purpose, if it is held; this is no eviction."""
        if record_id in self._by_id:
            self._remove(self._by_id[record_id])

    def evict_stale(self, policy: str, *, before_step: int) -> None:
        """Drop the policy's records whose oldest version lies before this step."""
        held = self.policies.get(policy)
        if held is not None:
            for step in [step for step in held.steps if step < before_step]:
                for entry in list(held.steps[step].values()):
                    self.evict(entry, "stale")

    def evict_void(self, policy: str, is_void: Callable[[Tags | PackTags], bool]) -> None:
        """Drop the policy's records that a resume made void."""
        for entry in [entry for entry in self._on_log.values() if entry.tags.source == policy]:
            if is_void(entry.tags):
                self.evict(entry, "void")

    def entries(self) -> Iterator[Entry]:
        """Everything held, in order of arrival."""
        return self._in_order.after(0)

    def after(self, number: int) -> Iterator[Entry]:
        """What came after this number, in whole or in part, and is held, in order of arrival.

        Nothing may be added or removed meanwhile.
        """
        return self._in_order.after(number)

    def num_after(self, number: int) -> int:
        """How many entries came after this number, a few of those included that are held no longer."""
        return self._in_order.num_after(number)

    def reserve_numbers(self, how_many: int) -> int:
        """The first of so many consecutive numbers for newcomers."""
        self.last_number += how_many
        return self.last_number - how_many + 1

    def number_from(self, number: int) -> None:
        """Somebody has seen this number: newcomers get higher ones, even when the log has lost its end."""
        if number <= MAX_NUMBER:
            self.last_number = max(self.last_number, number)

    def on_log_before(self, offset: int) -> Iterator[Entry]:
        """What stands on the log before `offset`, in its order there."""
        return takewhile(lambda entry: entry.offset < offset, self._on_log.values())

    def move(self, number: int, offset: int, place: int) -> None:
        """The entry of this number, if it is still held, now stands at the end of the log."""
        entry = self._on_log.pop(number, None)
        if entry is not None:
            entry.offset, entry.place = offset, place
            self._on_log[number] = entry

    def evict(self, entry: Entry, reason: str) -> None:
        """Let go of an entry before its time, and count its records."""
        self._remove(entry)
        self.policies[entry.tags.source].evicted[reason] += entry.count

    def _remove(self, entry: Entry) -> None:
        del self._on_log[entry.number]
        self._in_order.remove(entry)
        self._leave(entry)
        if entry.record_id:
            self._on_removal(entry.record_id)

    def _enter(self, entry: Entry) -> None:
        """Note an entry that has its place in the orders; too many of a prompt, and the oldest of them goes."""
        tags = entry.tags
        held = self.policies.setdefault(tags.source, PolicyRecords())
        held.steps.setdefault(tags.oldest.step, {})[entry.number] = entry
        self._account(held, entry, 1)
        if isinstance(tags, Tags):
            self._by_id[tags.record_id] = entry
            of_prompt = self._prompts.setdefault(tags.prompt_id, {}).setdefault(tags.source, [])
            held.num_prompts += not of_prompt
            insort(of_prompt, entry, key=_rank_of)
            of_kind = [other for other in of_prompt if other.tags.type == tags.type]
            if len(of_kind) > self._quotas[tags.type]:
                self.evict(of_kind[-1], "surpassed")

    def _leave(self, entry: Entry) -> None:
        """Undo what `_enter` did."""
        tags = entry.tags
        held = self.policies[tags.source]
        of_step = held.steps[tags.oldest.step]
        del of_step[entry.number]
        if not of_step:
            del held.steps[tags.oldest.step]
        self._account(held, entry, -1)
        if isinstance(tags, Tags):
            del self._by_id[tags.record_id]
            of_policies = self._prompts[tags.prompt_id]
            of_policies[tags.source].remove(entry)
            if not of_policies[tags.source]:
                held.num_prompts -= 1
                del of_policies[tags.source]
            if not of_policies:
                del self._prompts[tags.prompt_id]

    def _account(self, held: PolicyRecords, entry: Entry, sign: int) -> None:
        held.kinds[entry.tags.type] += sign * entry.count
        held.held_bytes += sign * entry.held_bytes
        self._num_records += sign * entry.count
        self.used_bytes += sign * entry.held_bytes
        self.body_bytes += sign * len(entry.body)


def _rank_of(entry: Entry) -> tuple[int, int, int]:
    return entry.rank
