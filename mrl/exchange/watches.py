"""Watches: answers to questions about prompts, and the clients that wait for later records on them."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from mrl.exchange.limits import WATCH_OVERHEAD_BYTES, Limits
from mrl.exchange.record_index import Entry, RecordIndex
from mrl.exchange.versions import VersionTracker
from mrl.records.exchange_messages import Fetch, PairFlow
from mrl.records.experience import RecordKind

MAX_IDLE_PAIRS = 10_000
"""Pairs of policies up to which those without traffic are listed too."""


@dataclass(slots=True)
class _Pair:
    hits: int = 0
    records: int = 0
    num_bytes: int = 0
    ages_versions: int = 0


class Flows:
    """Traffic per ordered pair of policies. A prompt counts once per Fetch, in `asked` as well as in `hits`."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def ask(self, receiver: str, num_prompts: int) -> None:
        """Count the prompts of one Fetch by the receiver."""
        self._asked[receiver] += num_prompts

    def hit(self, source: str, receiver: str) -> None:
        """Count a fetched prompt on which the receiver was given its first record of the source."""
        self._pair(source, receiver).hits += 1

    def deliver(self, source: str, receiver: str, num_bytes: int, age_versions: int) -> None:
        """Count one record that the receiver was given."""
        pair = self._pair(source, receiver)
        pair.records += 1
        pair.num_bytes += num_bytes
        pair.ages_versions += age_versions

    def table(self, sources: Iterable[str]) -> list[PairFlow]:
        """Return one row per pair: every receiver that has asked, with each of the `sources` but itself.

        With more than MAX_IDLE_PAIRS pairs, those without traffic are left out.
        """
        sources, pairs = list(sources), set(self._pairs)
        if len(sources) * len(self._asked) <= MAX_IDLE_PAIRS:
            pairs |= {(source, receiver) for source in sources for receiver in self._asked if source != receiver}
        return [self._row(source, receiver) for source, receiver in sorted(pairs)]

    def _pair(self, source: str, receiver: str) -> _Pair:
        pair = self._pairs.get((source, receiver))
        if pair is None:
            pair = self._pairs[source, receiver] = _Pair()
        return pair

    def _row(self, source: str, receiver: str) -> PairFlow:
        pair = self._pairs.get((source, receiver), _Pair())
        return PairFlow(
            source=source,
            receiver=receiver,
            asked=self._asked[receiver],
            hits=pair.hits,
            records=pair.records,
            bytes=pair.num_bytes,
            mean_age_versions=pair.ages_versions / max(1, pair.records),
            ages_versions=pair.ages_versions,
        )


@dataclass(slots=True, eq=False)
class Watch:
    """An open question of one client about one prompt."""

    policy: str
    """Policy of the client."""
    left: int
    """Records that may still be delivered."""
    max_age_versions: int | None
    kinds: Collection[RecordKind]
    sources: set[str] = field(default_factory=set)
    """Policies whose records have answered the question."""


class Watches:
    """Finds records for clients that ask, at once and later, and counts the traffic."""

    def __init__(self, limits: Limits, index: RecordIndex, versions: VersionTracker) -> None:
        self.flows = Flows()
        self.num_dropped = 0
        """Watches dropped or refused because there were too many."""
        self._limits, self._index, self._versions = limits, index, versions
        self._of_client: dict[bytes, dict[str, Watch]] = {}
        """Client -> prompt -> watch, the oldest first."""
        self._of_prompt: dict[str, dict[bytes, Watch]] = {}
        """Prompt -> client -> watch."""
        self._num_bytes = 0

    def answer(self, client: bytes, receiver: str, message: Fetch, *, is_new: bool) -> list[Entry]:
        """Return the records held for the client's policy `receiver`; watch the prompts if the Fetch says so.

        `is_new` says that the Fetch came for the first time.
        """
        prompt_ids = dict.fromkeys(message.prompt_ids)
        if is_new:
            self.flows.ask(receiver, len(prompt_ids))
        found: list[Entry] = []
        for prompt_id in prompt_ids:
            entries = self._youngest(message, receiver, prompt_id)
            self._settle(client, receiver, message, prompt_id, entries, is_new=is_new)
            found += entries
        return found

    def takers(self, entry: Entry) -> Iterator[bytes]:
        """Yield the clients whose watches take this new record, and count the record in these watches."""
        tags = entry.tags
        age = self._versions.age(tags)
        for client, watch in list(self._of_prompt.get(tags.prompt_id, {}).items()):
            is_wanted = watch.policy != tags.source and tags.type in watch.kinds and tags.is_for(watch.policy)
            if not is_wanted or not is_within(age, watch.max_age_versions):
                continue
            if tags.source not in watch.sources:
                watch.sources.add(tags.source)
                self.flows.hit(tags.source, watch.policy)
            self.pass_on(entry, watch.policy)
            watch.left -= 1
            if watch.left == 0:
                self.remove(client, tags.prompt_id)
            yield client

    def pass_on(self, entry: Entry, receiver: str) -> None:
        """Count a record that the receiver is given."""
        self.flows.deliver(entry.tags.source, receiver, len(entry.body), self._versions.age(entry.tags))

    def remove(self, client: bytes, prompt_id: str) -> None:
        """Close a watch, if there is one."""
        of_client = self._of_client.get(client, {})
        if of_client.pop(prompt_id, None) is None:
            return
        self._num_bytes -= _bytes_of(prompt_id)
        if not of_client:
            del self._of_client[client]
        of_prompt = self._of_prompt[prompt_id]
        del of_prompt[client]
        if not of_prompt:
            del self._of_prompt[prompt_id]

    def forget(self, client: bytes) -> None:
        """Close all watches of a client."""
        for prompt_id in list(self._of_client.get(client, ())):
            self.remove(client, prompt_id)

    def num_prompts(self) -> Counter[str]:
        """Return how many prompts the clients of each policy watch."""
        by_prompt = self._of_prompt.values()
        return Counter(policy for of_prompt in by_prompt for policy in {watch.policy for watch in of_prompt.values()})

    def _add(self, client: bytes, prompt_id: str, watch: Watch) -> None:
        """Open a watch.

        At the bound of a client its oldest watch is closed; at the bound of all watches none is opened.
        """
        of_client = self._of_client.get(client, {})
        if len(of_client) >= self._limits.watches_per_client:
            self.remove(client, next(iter(of_client)))
            self.num_dropped += 1
        if self._num_bytes + _bytes_of(prompt_id) > self._limits.watches_bytes:
            self.num_dropped += 1
            return
        self._of_client.setdefault(client, {})[prompt_id] = watch
        self._of_prompt.setdefault(prompt_id, {})[client] = watch
        self._num_bytes += _bytes_of(prompt_id)

    def _youngest(self, message: Fetch, receiver: str, prompt_id: str) -> list[Entry]:
        """Return the records of other policies that answer the Fetch on a prompt, youngest first."""
        dated = [
            (self._versions.age(entry.tags), entry)
            for entry in self._index.on_prompt(prompt_id, message.kinds, of_others_than=receiver)
            if entry.tags.is_for(receiver)
        ]
        fresh = [item for item in dated if is_within(item[0], message.max_age_versions)]
        fresh.sort(key=lambda item: (item[0], -item[1].number))
        return [entry for _, entry in fresh[: message.limit]]

    def _settle(
        self, client: bytes, receiver: str, message: Fetch, prompt_id: str, entries: list[Entry], *, is_new: bool
    ) -> None:
        """Count the records that a Fetch brought on one prompt, and watch the prompt for what is left of the limit."""
        before = None if is_new else self._of_client.get(client, {}).get(prompt_id)
        sources = {entry.tags.source for entry in entries}
        # A repeated Fetch was counted before, except for sources that its watch has not seen.
        counted = set() if is_new else before.sources if before is not None else sources
        for source in sources - counted:
            self.flows.hit(source, receiver)
        for entry in entries:
            self.pass_on(entry, receiver)
        self.remove(client, prompt_id)
        left = message.limit - len(entries)
        if message.watch and left:
            watch = Watch(receiver, left, message.max_age_versions, message.kinds, sources | counted)
            self._add(client, prompt_id, watch)


def is_within(age: int, max_age_versions: int | None) -> bool:
    """Whether a record of this age is young enough."""
    return max_age_versions is None or age <= max_age_versions


def _bytes_of(prompt_id: str) -> int:
    return WATCH_OVERHEAD_BYTES + sys.getsizeof(prompt_id)
