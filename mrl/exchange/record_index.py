"""The records held: per record type, policy and prompt the newest, within a byte budget."""

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from mrl.exchange.limits import Limits, held_bytes_of
from mrl.records.experience import RecordKind
from mrl.records.tags import Tags


@dataclass(slots=True, eq=False)
class Entry:
    """A record: its number, its tags, and its encoded form."""

    number: int
    """Place of the record in the order of arrival, which never changes; its key in the file."""
    tags: Tags
    body: bytes
    """The record as its source encoded it."""

    @property
    def record_id(self) -> str:
        """Id of the record, the same in every process."""
        return self.tags.record_id

    @property
    def held_bytes(self) -> int:
        """Bytes that the record counts against the budget."""
        return held_bytes_of(len(self.body))


@dataclass(slots=True)
class PolicyRecords:
    """The records held of one policy."""

    num_prompts: int = 0
    """Prompts on which records are held."""
    steps: dict[int, dict[int, Entry]] = field(default_factory=dict)
    """Step of the oldest version -> number -> entry, so that stale records are found without a search."""
    kinds: Counter[RecordKind] = field(default_factory=Counter)
    """Number of records of each type."""
    held_bytes: int = 0


class RecordIndex:
    """The newest records of every type, policy and prompt. Beyond the budget the oldest arrivals are removed."""

    def __init__(self, limits: Limits, on_removal: Callable[[Entry, str], None]) -> None:
        """`on_removal(entry, reason)` is called for every record that is removed."""
        self.policies: dict[str, PolicyRecords] = {}
        self.used_bytes = 0
        self._limits, self._on_removal = limits, on_removal
        self._by_id: dict[str, Entry] = {}
        # Not a dict: after many deletions at the front of a dict, finding its first key takes as many steps.
        self._in_order: OrderedDict[int, Entry] = OrderedDict()
        self._prompts: dict[str, dict[str, list[Entry]]] = {}
        """Prompt -> policy -> the policy's records, newest first."""

    def __len__(self) -> int:
        return len(self._in_order)

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._by_id

    def get(self, record_id: str) -> Entry | None:
        """Return the record of this id, if it is held."""
        return self._by_id.get(record_id)

    def numbered(self, numbers: Iterable[int]) -> list[Entry]:
        """Return the records of these numbers that are held."""
        found = map(self._in_order.get, numbers)
        return [entry for entry in found if entry is not None]

    def entries(self) -> Iterator[Entry]:
        """Return an iterator over all records held, in order of arrival."""
        return iter(self._in_order.values())

    def on_prompt(self, prompt_id: str, kinds: Collection[RecordKind], *, of_others_than: str) -> list[Entry]:
        """Return the records of these kinds that other policies have on a prompt; newest first within a policy."""
        of_policies = self._prompts.get(prompt_id, {}).items()
        return [
            entry for policy, held in of_policies if policy != of_others_than for entry in held
            if entry.tags.type in kinds
        ]  # fmt: skip

    def add(self, entry: Entry) -> bool:
        """Add a record with a higher number than all before. Returns whether it stayed.

        Records beyond the quota of their type, policy and prompt are removed, and so are those beyond the budget.
        """
        tags = entry.tags
        self._in_order[entry.number] = entry
        self._by_id[tags.record_id] = entry
        held = self.policies.setdefault(tags.source, PolicyRecords())
        held.steps.setdefault(tags.oldest.step, {})[entry.number] = entry
        of_prompt = self._prompts.setdefault(tags.prompt_id, {}).setdefault(tags.source, [])
        held.num_prompts += not of_prompt
        insort(of_prompt, entry, key=_rank)
        self._account(held, entry, 1)
        of_kind = [other for other in of_prompt if other.tags.type == tags.type]
        if len(of_kind) > self._limits.quota(tags.type):
            self.remove(of_kind[-1], "surpassed")
        while self.used_bytes > self._limits.budget_bytes:
            self.remove(next(iter(self._in_order.values())), "full")
        return entry.number in self._in_order

    def remove(self, entry: Entry, reason: str) -> None:
        """Remove a record, and tell `on_removal` the reason."""
        tags = entry.tags
        del self._in_order[entry.number], self._by_id[tags.record_id]
        held = self.policies[tags.source]
        of_step = held.steps[tags.oldest.step]
        del of_step[entry.number]
        if not of_step:
            del held.steps[tags.oldest.step]
        of_policies = self._prompts[tags.prompt_id]
        of_policies[tags.source].remove(entry)
        if not of_policies[tags.source]:
            held.num_prompts -= 1
            del of_policies[tags.source]
        if not of_policies:
            del self._prompts[tags.prompt_id]
        self._account(held, entry, -1)
        self._on_removal(entry, reason)

    def remove_stale(self, policy: str, *, before_step: int) -> None:
        """Remove the policy's records whose oldest version lies before this step."""
        held = self.policies.get(policy)
        if held is not None:
            for step in [step for step in held.steps if step < before_step]:
                for entry in list(held.steps[step].values()):
                    self.remove(entry, "stale")

    def remove_void(self, policy: str, is_void: Callable[[Tags], bool]) -> None:
        """Remove the policy's records that a resume made void."""
        held = self.policies.get(policy, PolicyRecords())
        for entry in [entry for of_step in held.steps.values() for entry in of_step.values()]:
            if is_void(entry.tags):
                self.remove(entry, "void")

    def _account(self, held: PolicyRecords, entry: Entry, sign: int) -> None:
        held.kinds[entry.tags.type] += sign
        held.held_bytes += sign * entry.held_bytes
        self.used_bytes += sign * entry.held_bytes


def _rank(entry: Entry) -> tuple[int, int, int]:
    """Return a sort key that puts the newest version first, and of one version the last arrival."""
    oldest = entry.tags.oldest
    return -oldest.run_epoch, -oldest.step, -entry.number
