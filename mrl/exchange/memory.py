"""What a daemon knows and must know again after a restart: records, versions, positions of readers, policies."""

from collections.abc import Iterable
from typing import Literal

from mrl.errors import RecordError
from mrl.exchange.entry import Entry
from mrl.exchange.intake import Intake, split
from mrl.exchange.journal import Indexed, LogEntry, Snapshot, Stored, StoredPack, bodies_of, read
from mrl.exchange.kinds import quotas
from mrl.exchange.log.frames import HEAD_BYTES
from mrl.exchange.shelf import Shelf
from mrl.exchange.streams import Streams
from mrl.exchange.subscriptions import Subscriptions
from mrl.exchange.versions import VersionBook
from mrl.records.codec import Buffer
from mrl.records.exchange_messages import Announce, Commit, Done
from mrl.records.experience import RecordKind
from mrl.records.tags import Tags

MAX_POLICIES = 1024

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

    def restore(self, snapshot: Snapshot | None, entries: Iterable[tuple[int, bytes]]) -> int:
        """Rebuild everything from what the log kept: its snapshot, and its entries with their offsets.

        Returns how many entries could not be read.
        """
        if snapshot is not None:
            self._restore_snapshot(snapshot)
        unreadable = 0
        for offset, payload in entries:
            try:
                entry, begin = read(payload)
            except RecordError:
                unreadable += 1
                continue
            self._restore_entry(entry, payload, offset, begin)
        for held in self.shelf.policies.values():
            held.evicted.clear()
        return unreadable

    def snapshot(self) -> Snapshot:
        """What a restored memory needs to know beside the entries of the log that it is still given."""
        return Snapshot(
            last_number=self.shelf.last_number,
            announcements=list(self.versions.announcements()),
            commits=list(self.streams.commits()),
            record_ids=self.intake.remembered(),
            puts=self.intake.stored.counts(),
            windows=[(client, list(puts)) for client, puts in self.intake.stored.windows()],
            indexed=sorted(self.shelf.indexed),
        )

    def admits(self, policy: str) -> bool:
        """Whether this policy is known or may become so; keeps tables bounded whatever names arrive."""
        if policy not in self.policies and len(self.policies) < MAX_POLICIES:
            self.policies[policy] = None
        return policy in self.policies

    def hold(self, entry: Entry) -> None:
        """Hold what the log has: a pack, or a single record of a type that is held so."""
        tags = entry.tags
        if isinstance(tags, Tags):
            self.intake.remember([tags.record_id])
        self.shelf.add(entry)
        is_held = self.shelf.holds(entry.number)
        if is_held and (fault := self.intake.fault_of_age(tags)):
            self.shelf.evict(entry, fault)
        elif isinstance(tags, Tags) and tags.type == "score":
            self._close_request(tags)
        elif isinstance(tags, Tags) and is_held and tags.type == "score_request":
            self.subscriptions.post(tags.record_id, (tags.scorer, "score_request"))

    def singles(self, pack: Entry) -> list[Entry]:
        """The records of a pack, each once, without those that say they are another policy's."""
        found: dict[str, Entry] = {}
        for one in split(pack):
            is_moved = self.shelf.holds(one.number) and one.record_id in self.shelf
            if one.tags.source == pack.tags.source and (is_moved or one.record_id not in self.shelf):
                found.setdefault(one.record_id, one)
        if pack.count == 1:
            for one in found.values():
                one.place = pack.place
        return list(found.values())

    def index(self, kinds: Iterable[RecordKind]) -> list[RecordKind]:
        """From now on records of these types are asked for one by one. Returns those that were not so before."""
        new = [kind for kind in kinds if kind not in self.shelf.indexed]
        found: set[str] = set()

        def split_once(pack: Entry) -> list[Entry]:
            singles = [one for one in self.singles(pack) if one.record_id not in found]
            found.update(one.record_id for one in singles)
            return singles

        for kind in new:
            self.shelf.index(kind, split_once)
        return new

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

    def _restore_snapshot(self, snapshot: Snapshot) -> None:
        self.shelf.number_from(snapshot.last_number)
        self.index(snapshot.indexed)
        self.intake.remember(snapshot.record_ids)
        self.intake.stored.restore(snapshot.puts, snapshot.windows)
        for announcement in snapshot.announcements:
            self.note_version(announcement)
        for commit in snapshot.commits:
            self.streams.commit(commit)

    def _restore_entry(self, entry: LogEntry, payload: bytes, offset: int, begin: int) -> None:
        match entry:
            case Announce():
                self.note_version(entry)
            case Done():
                self.remove_served(entry.record_ids)
            case Commit():
                self.streams.commit(entry)
            case Indexed():
                self.index(entry.kinds)
            case Stored():
                if entry.client:
                    self._note_put(entry)
                for pack, body, start in bodies_of(entry, payload, begin):
                    self._restore_pack(pack, body, offset, offset + HEAD_BYTES + start)

    def _note_put(self, put: Stored) -> None:
        num_records, num_bytes = sum(pack.count for pack in put.packs), sum(pack.num_bytes for pack in put.packs)
        self.intake.stored.note(put.client, put.seq, num_records, num_bytes, put.id_hashes)

    def _restore_pack(self, pack: StoredPack, body: Buffer, offset: int, place: int) -> None:
        if not self.admits(pack.tags.source):
            return
        entry = Entry(pack.tags, body, pack.number, pack.count, offset, place)
        for one in self.singles(entry) if pack.tags.type in self.shelf.indexed else [entry]:
            if not self.shelf.holds(one.number):
                self.hold(one)
            else:
                self.shelf.move(one.number, offset, place)

    def _close_request(self, score: Tags) -> None:
        request = self.shelf.get(score.request_id)
        if request and request.own_tags.scorer == score.source:
            self.shelf.remove(score.request_id)
