"""What was delivered and not yet taken, each record once per asking, within bounds."""

from collections.abc import Iterable

from mrl.exchange.sessions import remember
from mrl.records.codec import encode
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

    def put(self, delivered: Iterable[tuple[ExperienceRecord, int]]) -> list[Received]:
        """Take in what is new and fits, and return it."""
        taken = []
        for record, age_versions in delivered:
            if self.has_seen(record) or self._is_full():
                continue
            self._remember(record)
            taken.append(Received(record, age_versions))
            self._waiting.append(taken[-1])
            self._waiting_bytes += len(encode(record))
        return taken

    def has_seen(self, record: ExperienceRecord) -> bool:
        """Whether this record was taken in for the present asking."""
        return record.record_id in self._seen.get(record.prompt_id, ())

    def take(self) -> list[Received]:
        """Everything that waits, oldest first; the inbox is empty afterwards."""
        taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return taken

    def _is_full(self) -> bool:
        return len(self._waiting) >= self._max_records or self._waiting_bytes >= self._max_bytes

    def _remember(self, record: ExperienceRecord) -> None:
        remember(self._seen.setdefault(record.prompt_id, {}), record.record_id, MAX_REMEMBERED_IDS)
        if len(self._seen) > MAX_REMEMBERED_PROMPTS:
            del self._seen[next(iter(self._seen))]
