"""Questions and records: what answers a Fetch, and whose watch takes a newcomer."""

from collections.abc import Iterator

from mrl.exchange.entry import Entry
from mrl.exchange.flows import Flows
from mrl.exchange.shelf import Shelf
from mrl.exchange.versions import VersionBook
from mrl.exchange.watches import Watch, Watches
from mrl.records.exchange_messages import Fetch


class Matching:
    """Finds records for those who ask, now and later, and counts what went over."""

    def __init__(self, shelf: Shelf, versions: VersionBook, watches: Watches) -> None:
        self.watches, self.flows = watches, Flows()
        self._shelf, self._versions = shelf, versions

    def answer(self, client: bytes, receiver: str, message: Fetch, *, is_new: bool) -> list[Entry]:
        """What the shelf has for the client's policy `receiver`; prompts are watched if it wants that."""
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
        """The clients whose watches take this newcomer; their watches count it."""
        tags, age = entry.own_tags, self._versions.age(entry.tags)
        for client, watch in self.watches.on(tags.prompt_id, not_of=tags.source):
            if not is_within(age, watch.max_age_versions) or tags.type not in watch.kinds:
                continue
            if not tags.is_for(watch.policy):
                continue
            if tags.source not in watch.sources:
                watch.sources.add(tags.source)
                self.flows.hit(tags.source, watch.policy)
            self.pass_on(entry, watch.policy)
            watch.left -= 1
            if watch.left == 0:
                self.watches.remove(client, tags.prompt_id)
            yield client

    def pass_on(self, entry: Entry, receiver: str) -> None:
        """Count a record that goes over."""
        self.flows.deliver(entry.tags.source, receiver, len(entry.body), self._versions.age(entry.tags))

    def _youngest(self, message: Fetch, receiver: str, prompt_id: str) -> list[Entry]:
        """Youngest first, over all other policies."""
        dated = [
            (self._versions.age(entry.tags), entry)
            for entry in self._shelf.on_prompt(prompt_id, message.kinds, of_others_than=receiver)
            if entry.tags.is_for(receiver)
        ]
        fresh = [item for item in dated if is_within(item[0], message.max_age_versions)]
        fresh.sort(key=lambda item: (item[0], -item[1].number))
        return [entry for _, entry in fresh[: message.limit]]

    def _settle(
        self, client: bytes, receiver: str, message: Fetch, prompt_id: str, entries: list[Entry], *, is_new: bool
    ) -> None:
        """Count what one asked prompt brought, and watch it for what is left of the limit."""
        watch = None if is_new else self.watches.get(client, prompt_id)
        sources = {entry.tags.source for entry in entries}
        # A repeated Fetch was counted before, except for sources that its watch has not seen.
        counted = set() if is_new else watch.sources if watch is not None else sources
        for source in sources - counted:
            self.flows.hit(source, receiver)
        for entry in entries:
            self.pass_on(entry, receiver)
        left = message.limit - len(entries)
        if not message.watch or left == 0:
            self.watches.remove(client, prompt_id)
        elif watch is None:
            new = Watch(receiver, left, message.max_age_versions, message.kinds, sources)
            self.watches.add(client, prompt_id, new)
        else:
            watch.sources |= sources


def is_within(age: int, max_age_versions: int | None) -> bool:
    """Whether a record of this age is young enough."""
    return max_age_versions is None or age <= max_age_versions
