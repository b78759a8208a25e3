"""A client's inbox: records that were delivered and not yet taken, each once per Fetch of its prompt, within bounds."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from mrl.errors import RecordError
from mrl.exchange.limits import ClientLimits
from mrl.records.codec import decode
from mrl.records.exchange_messages import Deliver
from mrl.records.experience import Received, ScoreRequestRecord, experience_decoder

MAX_REMEMBERED_IDS = 256
"""Record ids remembered per prompt: a bound for records that come without a Fetch, such as requests."""


class Inbox:
    """Records that wait until the client's owner takes them. Adds to `counts`: received, unreadable."""

    def __init__(self, counts: Counter[str], limits: ClientLimits) -> None:
        self.is_awaited = False
        """Whether a caller waits for an answer and will take all records. Meanwhile the inbox is never full."""
        self._counts, self._limits = counts, limits
        self._waiting: list[Received] = []
        self._waiting_bytes = 0
        self._seen: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        """Prompt -> ids of its records that came since its last Fetch."""

    @property
    def is_full(self) -> bool:
        """Whether the inbox has no room for more records before the next `take`."""
        limits, num_records = self._limits, len(self._waiting)
        is_beyond = num_records >= limits.inbox_records or self._waiting_bytes >= limits.inbox_bytes
        return is_beyond and not self.is_awaited

    def expect(self, prompt_ids: Iterable[str]) -> None:
        """Forget what was delivered on these prompts: they are fetched anew, and their records may come again."""
        for prompt_id in prompt_ids:
            self._seen.pop(prompt_id, None)

    def take_in(self, message: Deliver) -> list[str] | None:
        """Add records that are new and readable. Return the ids of the message's requests; None when there is no room.

        The daemon delivers again what was not taken.
        """
        if self.is_full and message.records:
            return None
        requests = []
        for raw, age_versions in zip(message.records, message.ages_versions, strict=False):
            body = memoryview(raw)
            try:
                record = decode(body, experience_decoder)
            except RecordError:  # the daemon passes bodies on unread
                self._counts["unreadable"] += 1
                continue
            if isinstance(record, ScoreRequestRecord):
                requests.append(record.record_id)
            if self._is_new(record.prompt_id, record.record_id):
                self._waiting.append(Received(record, age_versions))
                self._waiting_bytes += len(body)
                self._counts["received"] += 1
        return requests

    def take(self) -> list[Received]:
        """Return all waiting records, oldest first, and empty the inbox."""
        taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return taken

    def _is_new(self, prompt_id: str, record_id: str) -> bool:
        seen = self._seen.setdefault(prompt_id, OrderedDict())
        if record_id in seen:
            return False
        seen[record_id] = None
        if len(seen) > MAX_REMEMBERED_IDS:
            seen.popitem(last=False)
        if len(self._seen) > self._limits.seen_prompts:
            self._seen.popitem(last=False)
        return True
