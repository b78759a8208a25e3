"""NATS JetStream: a file stream as a work queue, asynchronous publishes, a pull consumer that acknowledges each record.

Settings: `port`. The server acknowledges what the kernel has; it waits for the disk every two minutes.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import nats
from nats.js.api import RetentionPolicy, StorageType

from bench_peers.loads import Checklist
from bench_peers.part import DEADLINE_S, Settings, Stamp, stamp
from mrl.records.codec import decode, encode
from mrl.records.experience import ExperienceRecord, experience_decoder

STREAM, SUBJECT, READER = "bench", "bench.records", "reader"
FETCH_RECORDS, FETCH_S = 256, 1.0
MAX_PENDING = 1024


class _Link:
    """A connection, and the event loop on which it lives while somebody waits for it."""

    def __init__(self, settings: Settings) -> None:
        self._loop = asyncio.new_event_loop()
        self.wait(self._open(f"nats://127.0.0.1:{settings['port']}"))

    async def _open(self, address: str) -> None:
        self.link = await nats.connect(address, pending_size=64 * 1024 * 1024)
        self.stream = self.link.jetstream(publish_async_max_pending=MAX_PENDING)
        await self.stream.add_stream(
            name=STREAM, subjects=[SUBJECT], storage=StorageType.FILE, retention=RetentionPolicy.WORK_QUEUE
        )

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, DEADLINE_S))

    def close(self) -> None:
        self.wait(self.link.close())
        self._loop.close()


class Producer:
    """Publishes a part; at most `MAX_PENDING` records are unacknowledged."""

    def __init__(self, settings: Settings) -> None:
        self._link = _Link(settings)
        self._acknowledged: list[tuple[int, float]] = []

    def prepare(self, records: Sequence[ExperienceRecord]) -> Sequence[ExperienceRecord]:
        """Records are encoded when they are sent."""
        self._acknowledged.clear()
        return records

    def send(self, part: Sequence[ExperienceRecord], *, is_paced: bool) -> None:
        """Returns when the client has them, or with `is_paced` when they are acknowledged."""
        self._link.wait(self._send(part, is_paced))

    def finish(self) -> None:
        """Raises TimeoutError when the server does not answer."""
        self._link.wait(self._link.stream.publish_async_completed())

    def acknowledgements(self) -> list[tuple[int, float]]:
        """One per record."""
        return list(self._acknowledged)

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    async def _send(self, part: Sequence[ExperienceRecord], is_paced: bool) -> None:
        for record in part:
            sent = await self._link.stream.publish_async(SUBJECT, encode(record))
            sent.add_done_callback(self._note)
        if is_paced:
            await self._link.stream.publish_async_completed()

    def _note(self, sent: "asyncio.Future[Any]") -> None:
        sent.result()
        total = self._acknowledged[-1][0] if self._acknowledged else 0
        self._acknowledged.append((total + 1, time.monotonic()))


class Consumer:
    """The only reader of the work queue."""

    def __init__(self, settings: Settings) -> None:
        self._link = _Link(settings)
        self._reader = self._link.wait(self._link.stream.pull_subscribe(SUBJECT, durable=READER, stream=STREAM))

    def take_all(self, checklist: Checklist) -> Stamp:
        """Raises TimeoutError after a minute."""
        self._link.wait(self._take_all(checklist))
        return stamp()

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    async def _take_all(self, checklist: Checklist) -> None:
        while checklist.num_missing:
            try:
                messages = await self._reader.fetch(FETCH_RECORDS, timeout=FETCH_S)
            except nats.errors.TimeoutError:
                continue
            checklist.tick_off(decode(message.data, experience_decoder) for message in messages)
            for message in messages:
                await message.ack()
        await self._link.link.flush()
