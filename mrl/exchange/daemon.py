"""The exchange daemon: core, log and server socket put together, one round at a time."""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from mrl.errors import AddressError, DiskBroken, RecordError
from mrl.exchange.core import ExchangeCore
from mrl.exchange.deliveries import Outgoing
from mrl.exchange.journal import Snapshot, snapshot_decoder
from mrl.exchange.log.frames import MAX_PAYLOAD_BYTES
from mrl.exchange.log.segments import Durability, SegmentLog
from mrl.exchange.log.writer import LogWriter
from mrl.exchange.memory import WhenFull
from mrl.exchange.spool import Spools
from mrl.records.codec import Buffer, decode, encode
from mrl.records.exchange_messages import Stat
from mrl.transport.endpoints import port_of, publish_endpoint, read_endpoint
from mrl.transport.grants import Grant
from mrl.transport.hoarders import Hoarders
from mrl.transport.keys import RunKeys
from mrl.transport.server import ServerSocket

ENDPOINT = "exchange"
CLIENT_ROLES = ("learner", "worker", "supervisor", "admin")
MIB = 1024 * 1024
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = MIB, 64 * MIB
SEGMENTS_PER_LOG = 8
TICK_S = 0.05
ROLL_AGAIN_S = 1.0
WASTE_FACTOR = 2
"""The log may be this much longer than what is held of it, before it is tended."""
CLOSE_S = 10.0
MAX_UNREAD_MESSAGES = 2
"""Of one client: a connection that was cut leaves as many behind, which nobody counts until they are read."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the daemon may take of memory, disk and time."""

    budget_bytes: int = 256 * MIB
    """Records held in memory."""
    log_bytes: int = 1024 * MIB
    """All segments of the log together."""
    durability: Durability = "synced"
    """Whether a record is acknowledged once it is on the disk, or once the kernel has it."""
    when_full: WhenFull = "evict"
    per_prompt: int = 4
    """Successes kept of every policy and prompt."""
    max_age_versions: int = 200

    @property
    def segment_bytes(self) -> int:
        """Length at which a segment of the log is full."""
        return max(MIN_SEGMENT_BYTES, min(MAX_SEGMENT_BYTES, self.log_bytes // SEGMENTS_PER_LOG))


class ExchangeDaemon:
    """Serves one run. Everything acknowledged before the last daemon of this folder died is there again."""

    def __init__(
        self,
        folder: Path,
        endpoints: Path,
        keys: RunKeys,
        *,
        host: str,
        port: int,
        limits: Limits,
        clock: Callable[[], float],
        endpoint: str = ENDPOINT,
        sockets: Path | None = None,
    ) -> None:
        """Replay the log, listen, and publish where; `sockets` has its socket file, by default a folder of `endpoints`.

        Raises RunFolderError or AddressError when that cannot be done.
        """
        self.undelivered = 0
        """Messages whose receiver was gone or did not keep up."""
        self.unreadable = 0
        """Log entries of another schema, skipped at the start."""
        self._clock, self._limits = clock, limits
        self._tick_s = clock()
        self._released_offset = 0
        self._refused_rolls, self._roll_s = 0, 0.0
        self._spools = Spools(folder)
        self.log = SegmentLog(
            folder, max_bytes=limits.log_bytes, durability=limits.durability, segment_bytes=limits.segment_bytes
        )
        self.core = ExchangeCore(
            incarnation=secrets.token_hex(8),
            budget_bytes=limits.budget_bytes,
            per_prompt=limits.per_prompt,
            max_age_versions=limits.max_age_versions,
            when_full=limits.when_full,
            append=self._append,
            spools=self._spools,
            started_s=clock(),
        )
        self.unreadable += self.core.memory.restore(self._snapshot(), self.log.replay())
        self._writer = LogWriter(self.log)
        previous = port_of(read_endpoint(endpoints, endpoint))
        self._server = _bind(keys, host, port, previous=previous, ipc_path=(sockets or endpoints / "ipc") / endpoint)
        self._server.wake_on(self._writer.wake_fd)
        publish_endpoint(endpoints, endpoint, self._server.address, self._server.ipc_path)

    def round(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for messages or the log, answer, and do what the time asks for.

        Raises DiskBroken when nobody knows any more what is on the disk: a new daemon has to read it.
        """
        for client, body, grant in self._server.receive(timeout_s):
            self._send(self.core.receive(client, body, grant, self._clock()))
        # Looked at before the news is taken: what the writer reports later stands behind these places.
        is_rolling, second_offset = self._writer.is_rolling, self.log.second_offset
        for done in self._writer.finished():
            offset = done.offsets[0] if done.offsets else 0
            self._send(self.core.stored(done.ticket, offset, done.failure, self._clock()))
        now_s = self._clock()
        if now_s >= self._tick_s:
            self._tick_s = now_s + TICK_S
            self._send(self.core.tick(now_s))
        self._roll_when_full(now_s)
        if not is_rolling:
            self._free_front(second_offset)
        if self._writer.failure:
            raise DiskBroken(self._writer.failure)

    def stat(self) -> Stat:
        """The daemon's account of itself."""
        stat = self.core.stat(self._clock())
        refused = dict(Counter(stat.malformed) + Counter(self._server.refusals.counts()))
        return msgspec.structs.replace(
            stat,
            malformed=refused,
            undelivered=self.undelivered,
            log_bytes=self.log.size_bytes,
            log_max_bytes=self._limits.log_bytes,
            log_syncs=self.log.num_syncs,
            log_sync_s=self.log.sync_s,
            log_damaged=self.log.damaged,
        )

    def reload_keys(self) -> None:
        """Look at the allow-list at once instead of within half a second."""
        self._server.reload()

    def close(self) -> None:
        """Stop listening and flush the log."""
        self._server.close()
        self._spools.close()
        if not self._writer.failure:
            self.core.tick(self._clock())  # the last commits go on the log
        if self._writer.close(CLOSE_S):
            self.log.close()

    def _append(self, ticket: int, entry: Sequence[Buffer], *, is_move: bool) -> None:
        self._writer.post(ticket, [entry], into_reserve=is_move)

    def _roll_when_full(self, now_s: float) -> None:
        """Begin a new segment when one is full; where there is no room for it, the old one goes on for a second."""
        if self._writer.refused_rolls > self._refused_rolls:
            self._refused_rolls, self._roll_s = self._writer.refused_rolls, now_s + ROLL_AGAIN_S
        if self.log.wants_roll and not self._writer.is_rolling and now_s >= self._roll_s:
            self._writer.roll(encode(self.core.memory.snapshot()))

    def _free_front(self, second_offset: int) -> None:
        """Let the oldest segment go when the log is much longer than what is held; what is held of it moves up."""
        if second_offset in (self.log.first_offset, self._released_offset):
            return
        needed_bytes = self.core.shelf.body_bytes + self._limits.segment_bytes
        if self.log.size_bytes > WASTE_FACTOR * needed_bytes and self.core.move_up(second_offset):
            self._released_offset = second_offset
            self._writer.release(second_offset)

    def _snapshot(self) -> Snapshot | None:
        if not self.log.snapshot:
            return None
        try:
            return decode(self.log.snapshot, snapshot_decoder, max_bytes=MAX_PAYLOAD_BYTES)
        except RecordError:
            self.unreadable += 1
            return None

    def _send(self, out: Outgoing) -> None:
        for client, message in out:
            if not self._server.send(client, encode(self.stat() if isinstance(message, Stat) else message)):
                self.undelivered += 1


def _admits(grant: Grant) -> bool:
    return grant.role in CLIENT_ROLES


def _bind(keys: RunKeys, host: str, port: int, *, previous: int, ipc_path: Path) -> ServerSocket:
    """Listen on `port`; when any port will do, on the previous one if it is free, so that clients need not search."""
    listen = partial(
        ServerSocket, keys, admits=_admits, host=host, ipc_path=ipc_path, max_unread_messages=MAX_UNREAD_MESSAGES
    )
    if port == 0 and previous:
        with suppress(AddressError):
            return listen(port=previous, hoarders=Hoarders())
    return listen(port=port, hoarders=Hoarders())
