"""What was delivered and not yet taken, each record once per asking, within bounds."""

from collections.abc import Iterable

from mrl.exchange.sessions import remember
from mrl.records.experience import ExperienceRecord, Received

MAX_INBOX_RECORDS = 16_384
MAX_INBOX_BYTES = 64 * 1024 * 1024
MAX_REMEMBERED_PROMPTS = 65_536
MAX_REMEMBERED_IDS = 256
"""Per prompt, for what comes without an asking."""


class Inbox:
    """Records wait here until the learner takes them. A full inbox takes nothing in; the daemon delivers again."""

    def __init__(self, *, max_records: int = MAX_INBOX_RECORDS, max_bytes: int = MAX_INBOX_BYTES) -> None:
        self._max_records, self._max_bytes = max_records, max_bytes
        self._waiting: list[Received] = []
        self._waiting_bytes = 0
        self._seen: dict[str, dict[str, None]] = {}

    def expect(self, prompt_ids: Iterable[str]) -> None:
        """These prompts are asked anew: what was delivered for an earlier asking may come again."""
        for prompt_id in prompt_ids:
            self._seen.pop(prompt_id, None)

    def put(self, record: ExperienceRecord, age_versions: int, num_bytes: int) -> bool:
        """Take in a record of `num_bytes`; False when it is not new or does not fit."""
        if self.has_seen(record) or self.is_full:
            return False
        self._remember(record)
        self.add([Received(record, age_versions)], num_bytes)
        return True

    def add(self, received: Iterable[Received], num_bytes: int) -> None:
        """Take in what is known to be new, full or not."""
        self._waiting += received
        self._waiting_bytes += num_bytes

    def has_seen(self, record: ExperienceRecord) -> bool:
        """Whether this record was taken in for the present asking."""
        return record.record_id in self._seen.get(record.prompt_id, ())

    def take(self) -> list[Received]:
        """Everything that waits, oldest first; the inbox is empty afterwards."""
        taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return taken

    @property
    def is_full(self) -> bool:
        """Whether nothing more should come before the next `take`."""
        return len(self._waiting) >= self._max_records or self._waiting_bytes >= self._max_bytes

    def _remember(self, record: ExperienceRecord) -> None:
        remember(self._seen.setdefault(record.prompt_id, {}), record.record_id, MAX_REMEMBERED_IDS)
        if len(self._seen) > MAX_REMEMBERED_PROMPTS:
            del self._seen[next(iter(self._seen))]
