"""The sending end of a client: records gathered into Puts, which are sent again until the daemon has answered."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from mrl.exchange.outbox import Outbox, Unanswered
from mrl.exchange.packing import OpenPut
from mrl.exchange.shared_files import SharedFiles
from mrl.records.codec import encode
from mrl.records.exchange_messages import Put, PutAck
from mrl.records.experience import ExperienceRecord
from mrl.records.packs import Spooled

MAX_UNACKNOWLEDGED_BYTES = 16 * 1024 * 1024
MAX_UNACKNOWLEDGED_PUTS = 512
"""Fewer than the daemon remembers of one client."""
MAX_SMALL_PUTS = 4
"""So many Puts that are not full may be unanswered; what is published meanwhile is gathered."""
GATHER_S = 0.02
"""Nothing is gathered much longer than this, however far the daemon is."""
FIRST_WINDOW_BYTES = 1024 * 1024
"""Before the daemon has said how much it takes."""


class Publisher:
    """Used under the client's lock. Adds to `counts`: stored, refused/<reason>, dropped, too_large."""

    def __init__(
        self,
        client: str,
        files: SharedFiles,
        counts: Counter[str],
        *,
        send: Callable[[bytes], None],
        next_seq: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.window_bytes = FIRST_WINDOW_BYTES
        """What the daemon takes before it has answered."""
        self._client, self._files, self._counts = client, files, counts
        self._send, self._next_seq, self._clock = send, next_seq, clock
        self._open = OpenPut()
        self._puts = Outbox()
        self._last_seq = 0
        self._gathered_from_s = clock()

    def gather(self, records: Sequence[ExperienceRecord]) -> Iterator[OpenPut]:
        """Take records in. Stops before a Put is made of what was gathered, so that there may be room for it."""
        if not self._open.num_records:
            self._gathered_from_s = self._clock()
        place = 0
        while place < len(records):
            while (verdict := self._open.add(records[place])) == "no_room":
                yield self._open
                self._send_full()
            place += 1
            if verdict == "too_large":
                self._counts[verdict] += 1
            else:
                place += self._open.add_alike(records, place)
            if self._open.is_full:
                yield self._open
                self._send_full()
        self._send_small()

    def has_room(self, put: OpenPut) -> bool:
        """Whether this Put can wait beside the others, or waits there already."""
        return put is not self._open or self._fits(put.num_bytes)

    def send_gathered(self, now_s: float) -> None:
        """What was gathered long enough goes, if there is room for it."""
        if now_s - self._gathered_from_s >= GATHER_S and self._fits(self._open.num_bytes):
            self.send_off()

    def send_off(self) -> int:
        """Make a Put of what was gathered, if there is anything; returns the number of the last Put."""
        if self._open.num_records:
            put, self._open = self._open, OpenPut()
            seq = self._last_seq = self._next_seq()
            message, spooled = self._message(seq, put)
            whole = (lambda: self._whole(message, spooled)) if spooled is not None else None
            waiting = Unanswered(
                encode(message), self._clock(), put.num_bytes, is_sent=False, num_records=put.num_records, whole=whole
            )
            self._puts.add(seq, waiting)
            self.send()
        return self._last_seq

    def send(self) -> None:
        """What may be sent now."""
        for body in self._puts.next_to_send(self.window_bytes, self._clock()):
            self._send(body)

    def send_again(self, now_s: float) -> None:
        """What should have been answered by now."""
        for body in self._puts.overdue(now_s):
            self._send(body)

    def start_over(self) -> None:
        """There is a new daemon, which was sent nothing."""
        self._puts.start_over()

    def note_answer(self, message: PutAck) -> None:
        """The daemon has dealt with a Put."""
        self.window_bytes = message.window_bytes
        self._puts.postpone(self._clock())
        if self._give_up(message.seq) is None:
            return  # answered before
        self._counts["stored"] += message.stored
        self._counts.update({f"refused/{reason}": number for reason, number in message.refused.items()})
        self._send_small()

    def is_clear(self, upto_seq: int) -> bool:
        """Whether every Put up to this one was answered."""
        return self._puts.is_clear(upto_seq)

    def _send_small(self) -> None:
        if len(self._puts) < MAX_SMALL_PUTS and self._fits(self._open.num_bytes):
            self.send_off()

    def _send_full(self) -> None:
        """There was time for room; now the oldest make it."""
        while not self._fits(self._open.num_bytes) and (seq := self._puts.oldest()):
            dropped = self._give_up(seq)
            self._counts["dropped"] += dropped.num_records if dropped is not None else 0
        self.send_off()

    def _message(self, seq: int, put: OpenPut) -> tuple[Put, Spooled | None]:
        """By file where the daemon reads it and there is room, else with all records in it."""
        heads, arrays = put.sealed()
        spooled = self._files.write(seq, arrays)
        if spooled is None:
            pairs = zip(heads, arrays, strict=True)
            heads = [msgspec.structs.replace(head, records=msgspec.Raw(array)) for head, array in pairs]
        return Put(client=self._client, seq=seq, packs=heads, spooled=spooled), spooled

    def _whole(self, message: Put, spooled: Spooled) -> bytes | None:
        """A Put by file as one with all records in it; None when its file has been lost."""
        data = self._files.read_back(spooled)
        if data is None:
            return None
        return encode(message.with_records(data))

    def _fits(self, num_bytes: int) -> bool:
        is_short = len(self._puts) < MAX_UNACKNOWLEDGED_PUTS
        return is_short and self._puts.num_bytes + num_bytes <= MAX_UNACKNOWLEDGED_BYTES

    def _give_up(self, seq: int) -> Unanswered | None:
        self._files.free(seq)
        return self._puts.remove(seq)
