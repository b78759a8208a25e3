"""What is held: per record type, policy and prompt the newest records, within a byte budget."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from mrl.exchange.kinds import held_bytes
from mrl.records.experience import ExperienceRecord, RecordKind, kind_of


@dataclass(slots=True, eq=False)
class Entry:
    """One held record; `arrival` numbers the records in the order in which they came."""

    record: ExperienceRecord
    payload_bytes: int
    held_bytes: int
    """What the entry counts against the budget."""
    arrival: int

    @property
    def kind(self) -> RecordKind:
        """The type of its record."""
        return kind_of(self.record)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sorts newest first."""
        oldest = self.record.oldest
        return -oldest.run_epoch, -oldest.step, -self.arrival


@dataclass(slots=True)
class PolicyRecords:
    """What is held of one policy."""

    prompts: dict[str, list[Entry]] = field(default_factory=dict)
    steps: dict[int, dict[str, Entry]] = field(default_factory=dict)
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
        """`quotas`: records per type, policy and prompt. `on_removal(record_id)` is told of whatever leaves."""
        self.policies: dict[str, PolicyRecords] = {}
        self.used_bytes = 0
        self.payload_bytes = 0
        self._quotas, self._budget_bytes, self._on_removal = quotas, budget_bytes, on_removal
        self._entries: dict[str, Entry] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._entries

    def fits(self, record: ExperienceRecord, payload_bytes: int) -> bool:
        """Whether a record of this size can be held at all."""
        return held_bytes(record, payload_bytes) <= self._budget_bytes

    def get(self, record_id: str) -> Entry | None:
        """The entry of this id, if it is still held."""
        return self._entries.get(record_id)

    def add(self, record: ExperienceRecord, payload_bytes: int) -> None:
        """Hold a record that is not held yet, evicting what it displaces."""
        self._arrivals += 1
        entry = Entry(record, payload_bytes, held_bytes(record, payload_bytes), self._arrivals)
        of_policy = self.policies.setdefault(record.source, PolicyRecords())
        of_prompt = of_policy.prompts.setdefault(record.prompt_id, [])
        insort(of_prompt, entry, key=lambda held: held.rank)
        of_policy.steps.setdefault(record.oldest.step, {})[record.record_id] = entry
        self._entries[record.record_id] = entry
        self._account(of_policy, entry, 1)
        of_kind = [held for held in of_prompt if held.kind == entry.kind]
        if len(of_kind) > self._quotas[entry.kind]:
            self._evict(of_kind[-1], "surpassed")
        while self.used_bytes > self._budget_bytes:
            self._evict(next(iter(self._entries.values())), "full")

    def on_prompt(self, prompt_id: str, kinds: Collection[RecordKind], *, of_others_than: str) -> Iterator[Entry]:
        """What the other policies have on a prompt; newest first within a policy."""
        for policy, held in self.policies.items():
            if policy != of_others_than:
                yield from (entry for entry in held.prompts.get(prompt_id, ()) if entry.kind in kinds)

    def remove(self, record_id: str) -> None:
        """Let go of a record that has served its purpose, if it is held; this is no eviction."""
        if record_id in self._entries:
            self._remove(self._entries[record_id])

    def evict_stale(self, policy: str, *, before_step: int) -> None:
        """Drop the policy's records whose oldest version lies before this step."""
        held = self.policies.get(policy)
        if held is not None:
            for step in [step for step in held.steps if step < before_step]:
                for entry in list(held.steps[step].values()):
                    self._evict(entry, "stale")

    def evict_void(self, policy: str, is_void: Callable[[ExperienceRecord], bool]) -> None:
        """Drop the policy's records that a resume made void."""
        for entry in [entry for entry in self._entries.values() if entry.record.source == policy]:
            if is_void(entry.record):
                self._evict(entry, "void")

    def records(self) -> Iterator[ExperienceRecord]:
        """Everything held, in order of arrival."""
        for entry in self._entries.values():
            yield entry.record

    def _evict(self, entry: Entry, reason: str) -> None:
        self._remove(entry)
        self.policies[entry.record.source].evicted[reason] += 1

    def _remove(self, entry: Entry) -> None:
        record = entry.record
        held = self.policies[record.source]
        del self._entries[record.record_id]
        of_prompt = held.prompts[record.prompt_id]
        of_prompt.remove(entry)
        if not of_prompt:
            del held.prompts[record.prompt_id]
        of_step = held.steps[record.oldest.step]
        del of_step[record.record_id]
        if not of_step:
            del held.steps[record.oldest.step]
        self._account(held, entry, -1)
        self._on_removal(record.record_id)

    def _account(self, held: PolicyRecords, entry: Entry, sign: int) -> None:
        held.kinds[entry.kind] += sign
        held.held_bytes += sign * entry.held_bytes
        self.used_bytes += sign * entry.held_bytes
        self.payload_bytes += sign * entry.payload_bytes
