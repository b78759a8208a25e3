"""The sending end of a client: records gathered into Puts, each sent until the daemon has answered it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import structlog

from mrl.exchange.limits import ClientLimits
from mrl.records.codec import MAX_MESSAGE_BYTES, encode
from mrl.records.exchange_messages import MAX_PUT_RECORDS, Put, PutAck
from mrl.records.experience import ExperienceRecord
from mrl.transport.requests import Requests

HEAD_BYTES = 1024
"""What a Put has beside its records, at most; a record may be so much shorter than a message."""

log = structlog.get_logger()


class RecordPublisher:
    """Used under the client's lock. Adds to `counts`: stored, refused/<reason>, dropped, too_large."""

    def __init__(
        self, client: str, requests: Requests, counts: Counter[str], limits: ClientLimits, send: Callable[[bytes], None]
    ) -> None:
        self._client, self._requests, self._counts, self._limits, self._send = client, requests, counts, limits, send
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._gathered_from_s = 0.0
        self._records: dict[int, int] = {}
        """Unanswered Puts by number: how many records each has."""
        self._last_number = 0

    def gather(self, records: Sequence[ExperienceRecord], now_s: float) -> Iterator[int]:
        """Take records in. Stops before a Put is made that may need room: yields its length, and goes on with it."""
        for record in records:
            body = encode(record)
            if len(body) > MAX_MESSAGE_BYTES - HEAD_BYTES:
                self._note_too_large(record, len(body))
                continue
            if self._gathered and self._gathered_bytes + len(body) > MAX_MESSAGE_BYTES - HEAD_BYTES:
                yield self._gathered_bytes
                self._make_room(now_s)
            if not self._gathered:
                self._gathered_from_s = now_s
            self._gathered.append(body)
            self._gathered_bytes += len(body)
            if self._gathered_bytes >= self._limits.put_bytes or len(self._gathered) >= MAX_PUT_RECORDS:
                yield self._gathered_bytes
                self._make_room(now_s)
        self.send_small(now_s)

    def _note_too_large(self, record: ExperienceRecord, num_bytes: int) -> None:
        """A person is told of the first; the policy goes on, and its peers learn nothing of such groups."""
        if not self._counts["too_large"]:
            most = MAX_MESSAGE_BYTES - HEAD_BYTES
            log.warning(
                "a record is longer than a message may be: peers do not get it",
                task=record.task,
                bytes=num_bytes,
                most=most,
                cure="a smaller rollout.group_size or rollout.max_new_tokens",
            )
        self._counts["too_large"] += 1

    def has_room(self, num_bytes: int) -> bool:
        """Whether a Put of this length can wait beside the others."""
        return not self._records or self._requests.num_bytes + num_bytes <= self._limits.unacknowledged_bytes

    def send_small(self, now_s: float) -> None:
        """Send what was gathered, if few Puts are unanswered; otherwise more is gathered."""
        if len(self._records) < self._limits.small_puts and self.has_room(self._gathered_bytes):
            self.send_off(now_s)

    def on_tick(self, now_s: float) -> None:
        """Send what was gathered for long enough, if there is room, and again what was lost."""
        if now_s - self._gathered_from_s >= self._limits.gather_s and self.has_room(self._gathered_bytes):
            self.send_off(now_s)
        for body in self._requests.due(now_s).bodies:
            self._send(body)

    def send_off(self, now_s: float) -> int:
        """Make a Put of what was gathered, if there is anything; returns the number of the last Put."""
        if self._gathered:
            number = self._requests.next_number
            raws = [msgspec.Raw(body) for body in self._gathered]
            self._requests.post(encode(Put(client=self._client, seq=number, records=raws)), now_s)
            self._records[number] = len(raws)
            self._last_number = number
            self._gathered, self._gathered_bytes = [], 0
            self.send_first(now_s)
        return self._last_number

    def send_first(self, now_s: float) -> None:
        """Send what the window has room for."""
        for body in self._requests.first(now_s):
            self._send(body)

    def start_over(self, now_s: float) -> None:
        """Nothing of what waits has been sent, as far as a new link or a new daemon is concerned."""
        self._requests.start_over()
        self.send_first(now_s)

    def note_answer(self, message: PutAck, now_s: float) -> None:
        """The daemon has dealt with some Puts."""
        self._requests.window_bytes = message.window_bytes
        is_new = [self._requests.answered(number, now_s) for number in message.seqs]
        for number in message.seqs:
            self._records.pop(number, None)
        if any(is_new):
            self._counts["stored"] += message.stored
            self._counts.update({f"refused/{reason}": number for reason, number in message.refused.items()})
        self.send_first(now_s)
        self.send_small(now_s)

    def is_clear(self, upto_number: int) -> bool:
        """Whether every Put up to this one was answered."""
        oldest = self._requests.oldest
        return oldest is None or oldest > upto_number

    def _make_room(self, now_s: float) -> None:
        """There was time for room; now the oldest make it."""
        while not self.has_room(self._gathered_bytes) and (oldest := self._requests.oldest) is not None:
            self._requests.forget(oldest)
            before = self._counts["dropped"]
            self._counts["dropped"] += self._records.pop(oldest)
            if before.bit_length() != self._counts["dropped"].bit_length():  # at first, and whenever they have doubled
                log.warning("records for peers were dropped: the exchange takes none", records=self._counts["dropped"])
        self.send_off(now_s)
