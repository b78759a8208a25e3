"""What a daemon knows and must know again after a restart: records, versions, positions of readers, policies."""

from collections.abc import Iterable
from typing import Literal

from mrl.exchange.intake import Intake
from mrl.exchange.journal import LogEntry, Snapshot, Stored
from mrl.exchange.kinds import quotas
from mrl.exchange.shelf import Shelf
from mrl.exchange.streams import Streams
from mrl.exchange.subscriptions import Subscriptions
from mrl.exchange.versions import VersionBook
from mrl.records.exchange import Announce, Commit, Done
from mrl.records.tags import Tags, tags_of

MAX_POLICIES = 256

WhenFull = Literal["evict", "refuse"]


class Memory:
    """Everything that the log rebuilds, and the rules by which it changes."""

    def __init__(self, *, budget_bytes: int, per_prompt: int, max_age_versions: int, when_full: WhenFull) -> None:
        """`when_full`: beyond the budget the oldest go, or nothing is taken until streams have committed something."""
        self.versions = VersionBook()
        self.subscriptions = Subscriptions()
        self.shelf = Shelf(quotas=quotas(per_prompt), budget_bytes=budget_bytes, on_removal=self.subscriptions.drop)
        self.streams = Streams(self.shelf, self.versions)
        self.intake = Intake(
            self.shelf,
            self.versions,
            lambda: self.streams.freed,
            max_age_versions=max_age_versions,
            keeps_all=when_full == "refuse",
        )
        self.policies: dict[str, None] = {}
        self._max_age_versions = max_age_versions

    def restore(self, snapshot: Snapshot | None, entries: Iterable[tuple[int, LogEntry]]) -> None:
        """Rebuild everything from what the log kept: its snapshot, and its entries with their offsets."""
        if snapshot is not None:
            self.shelf.number_from(snapshot.last_number)
            self.intake.remember(snapshot.record_ids)
            for announcement in snapshot.announcements:
                self.note_version(announcement)
            for commit in snapshot.commits:
                self.streams.commit(commit)
        for offset, entry in entries:
            self._restore_entry(entry, offset)
        for held in self.shelf.policies.values():
            held.evicted.clear()

    def snapshot(self) -> Snapshot:
        """What a restored memory needs to know beside the entries of the log that it is still given."""
        return Snapshot(
            last_number=self.shelf.last_number,
            announcements=list(self.versions.announcements()),
            commits=list(self.streams.commits()),
            record_ids=self.intake.remembered(),
        )

    def admits(self, policy: str) -> bool:
        """Whether this policy is known or may become so; keeps tables bounded whatever names arrive."""
        if policy not in self.policies and len(self.policies) < MAX_POLICIES:
            self.policies[policy] = None
        return policy in self.policies

    def hold(self, tags: Tags, body: bytes, offset: int, number: int) -> None:
        """Hold a record that the log has."""
        self.intake.remember([tags.record_id])
        self.shelf.add(tags, body, offset=offset, number=number)
        entry = self.shelf.get(tags.record_id)
        if entry is not None and (fault := self.intake.fault_of_age(tags)):
            self.shelf.evict(entry, fault)
        elif tags.type == "score":
            self._close_request(tags)
        elif entry is not None and tags.type == "score_request":
            self.subscriptions.post(tags.record_id, (tags.scorer, "score_request"))

    def remove_served(self, record_ids: Iterable[str]) -> None:
        """These requests were done."""
        for record_id in record_ids:
            self.shelf.remove(record_id)

    def note_version(self, message: Announce) -> bool:
        """Take over an announcement and evict what it made stale or void; False when it says nothing new."""
        if not self.admits(message.policy):
            return False
        is_new = self.versions.announce(message.policy, message.version, resumed=message.resumed)
        if is_new:
            if message.resumed:
                self.shelf.evict_void(message.policy, self.versions.is_void)
            newest = self.versions.newest[message.policy]
            self.shelf.evict_stale(message.policy, before_step=newest.step - self._max_age_versions)
        return is_new

    def _restore_entry(self, entry: LogEntry, offset: int) -> None:
        match entry:
            case Announce():
                self.note_version(entry)
            case Done():
                self.remove_served(entry.record_ids)
            case Commit():
                self.streams.commit(entry)
            case Stored():
                self._restore_records(entry, offset)

    def _restore_records(self, entry: Stored, offset: int) -> None:
        for number, body in zip(entry.numbers, map(bytes, entry.records), strict=False):
            tags = tags_of(body)
            if tags is not None and tags.record_id in self.shelf:
                self.shelf.move(tags.record_id, offset)
            elif tags is not None and self.admits(tags.source):
                self.hold(tags, body, offset, number)

    def _close_request(self, score: Tags) -> None:
        request = self.shelf.get(score.request_id)
        if request and request.tags.scorer == score.source:
            self.shelf.remove(score.request_id)
