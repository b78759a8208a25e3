"""The success memory: per policy and prompt the newest successes, within a byte budget."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mrl.records.experience import ExperienceRecord

OVERHEAD_BYTES = 1000
"""Memory that one held record costs beyond its encoded form: objects, keys, indices (a test measures it)."""


@dataclass(slots=True, eq=False)
class Entry:
    """One held record; `arrival` numbers the records in the order in which they came."""

    record: ExperienceRecord
    payload_bytes: int
    arrival: int

    @property
    def held_bytes(self) -> int:
        """What the entry counts against the budget."""
        return self.payload_bytes + OVERHEAD_BYTES

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
    num_records: int = 0
    held_bytes: int = 0
    evicted: Counter[str] = field(default_factory=Counter)


class Shelf:
    """The `per_prompt` newest records of every policy and prompt; beyond `budget_bytes` the oldest arrivals go."""

    def __init__(self, *, per_prompt: int, budget_bytes: int) -> None:
        self.policies: dict[str, PolicyRecords] = {}
        self.used_bytes = 0
        self.payload_bytes = 0
        self._per_prompt, self._budget_bytes = per_prompt, budget_bytes
        self._entries: dict[str, Entry] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._entries

    def fits(self, payload_bytes: int) -> bool:
        """Whether a record of this size can be held at all."""
        return payload_bytes + OVERHEAD_BYTES <= self._budget_bytes

    def get(self, record_id: str) -> Entry | None:
        """The entry of this id, if it is still held."""
        return self._entries.get(record_id)

    def add(self, record: ExperienceRecord, payload_bytes: int) -> None:
        """Hold a record that is not held yet, evicting what it displaces."""
        self._arrivals += 1
        entry = Entry(record, payload_bytes, self._arrivals)
        of_policy = self.policies.setdefault(record.source, PolicyRecords())
        of_prompt = of_policy.prompts.setdefault(record.prompt_id, [])
        insort(of_prompt, entry, key=lambda held: held.rank)
        of_policy.steps.setdefault(record.oldest.step, {})[record.record_id] = entry
        self._entries[record.record_id] = entry
        self._account(of_policy, entry, 1)
        if len(of_prompt) > self._per_prompt:
            self._evict(of_prompt[-1], "surpassed")
        while self.used_bytes > self._budget_bytes:
            self._evict(next(iter(self._entries.values())), "full")

    def successes(self, prompt_id: str, *, of_others_than: str) -> Iterator[Entry]:
        """What the other policies achieved on a prompt; newest first within a policy."""
        for policy, held in self.policies.items():
            if policy != of_others_than:
                yield from held.prompts.get(prompt_id, ())

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
        held.evicted[reason] += 1

    def _account(self, held: PolicyRecords, entry: Entry, sign: int) -> None:
        held.num_records += sign
        held.held_bytes += sign * entry.held_bytes
        self.used_bytes += sign * entry.held_bytes
        self.payload_bytes += sign * entry.payload_bytes
