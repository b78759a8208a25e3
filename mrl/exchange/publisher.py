"""The sending half of a client: records gathered into Puts, each sent until the daemon has answered it."""

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
"""Bytes that a Put has beside its records, at most. A record has to be this much shorter than a message may be."""

log = structlog.get_logger()


class RecordPublisher:
    """Gathers records into Puts. Used under the client's lock.

    Adds to `counts`: stored, refused/<reason>, dropped, too_large.
    """

    def __init__(
        self, client: str, requests: Requests, counts: Counter[str], limits: ClientLimits, send: Callable[[bytes], None]
    ) -> None:
        self._client, self._requests, self._counts, self._limits, self._send = client, requests, counts, limits, send
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._gathered_from_s = 0.0
        self._records: dict[int, int] = {}
        """Number of an unanswered Put -> number of its records."""
        self._last_number = 0

    def gather(self, records: Sequence[ExperienceRecord], now_s: float) -> Iterator[int]:
        """Take in records. Before each Put that may need room, yield its length in bytes, then make it and go on."""
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
        """Count a record that is too large, and log the first. The policy goes on; peers never get such records."""
        if not self._counts["too_large"]:
            most = MAX_MESSAGE_BYTES - HEAD_BYTES
            log.warning(
                "a record is too large for a message, so peers do not receive it",
                task=record.task,
                bytes=num_bytes,
                most=most,
                cure="lower rollout.group_size or rollout.max_new_tokens",
            )
        self._counts["too_large"] += 1

    def has_room(self, num_bytes: int) -> bool:
        """Whether a Put of this length can wait beside those that are unanswered."""
        return not self._records or self._requests.num_bytes + num_bytes <= self._limits.unacknowledged_bytes

    def send_small(self, now_s: float) -> None:
        """Send the gathered records if few Puts are unanswered; otherwise go on gathering."""
        if len(self._records) < self._limits.small_puts and self.has_room(self._gathered_bytes):
            self.send_off(now_s)

    def on_tick(self, now_s: float) -> None:
        """Send records that were gathered for long enough, if there is room, and lost Puts again."""
        if now_s - self._gathered_from_s >= self._limits.gather_s and self.has_room(self._gathered_bytes):
            self.send_off(now_s)
        for body in self._requests.due(now_s).bodies:
            self._send(body)

    def send_off(self, now_s: float) -> int:
        """Make a Put of the gathered records, if there are any; return the number of the last Put."""
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
        """Send Puts for the first time, as far as the window has room."""
        for body in self._requests.first(now_s):
            self._send(body)

    def start_over(self, now_s: float) -> None:
        """Send all unanswered Puts anew, over a new link or to a new daemon."""
        self._requests.start_over()
        self.send_first(now_s)

    def note_answer(self, message: PutAck, now_s: float) -> None:
        """Note that the daemon has answered some Puts."""
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
        """Whether every Put up to this number was answered."""
        oldest = self._requests.oldest
        return oldest is None or oldest > upto_number

    def _make_room(self, now_s: float) -> None:
        """Drop the oldest Puts until the gathered records have room, and send these. The caller has waited before."""
        while not self.has_room(self._gathered_bytes) and (oldest := self._requests.oldest) is not None:
            self._requests.forget(oldest)
            before = self._counts["dropped"]
            self._counts["dropped"] += self._records.pop(oldest)
            if before.bit_length() != self._counts["dropped"].bit_length():  # at first, and whenever they have doubled
                log.warning(
                    "records for peers were dropped: the exchange accepts none", records=self._counts["dropped"]
                )
        self.send_off(now_s)
