"""The exchange daemon: core, file and server socket put together, one round at a time."""

import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from mrl.errors import AddressError, DiskBroken
from mrl.exchange.core import ExchangeCore, Outgoing
from mrl.exchange.limits import Limits
from mrl.exchange.replay import Replay, Replayed, take_over
from mrl.exchange.store import Store
from mrl.exchange.writer import Writer
from mrl.records.codec import encode
from mrl.records.exchange_messages import Stat
from mrl.transport.endpoints import port_of, publish_endpoint, read_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import RunKeys
from mrl.transport.server import ServerSocket

ENDPOINT = "exchange"
CLIENT_ROLES = ("learner", "worker", "supervisor", "admin")
TICK_S = 0.05
"""Seconds between two ticks of the core."""
CLOSE_S = 10.0
"""Seconds that the writer has to end."""
MAX_UNREAD_MESSAGES = 2
"""Messages of one client that may wait unread; each may be 8 MiB long."""


class ExchangeDaemon:
    """The exchange daemon of one run.

    It begins with all records that were held when the last daemon of this folder died.
    """

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
        sockets: Path | None = None,
        replay: Replay | None = None,
    ) -> None:
        """Open the file, listen, and publish the address.

        `sockets` is the folder of the socket file, by default one in `endpoints`. The records of `replay` are taken
        over where they are not in the file. Raises RunFolderError or AddressError when any of that cannot be done.
        """
        self.replayed: Replayed | None = None
        """Numbers of records that this daemon took over from another run; None where it took over none."""
        self.num_undelivered = 0
        """Messages whose receiver was gone or did not keep up."""
        self._clock, self._tick_s = clock, clock()
        self.store = Store(folder, limits)
        self.core = ExchangeCore(limits, incarnation=secrets.token_hex(8), started_s=clock())
        contents = self.store.contents()
        if replay is not None:
            contents, self.replayed = take_over(self.store, contents, replay, limits)
        self.core.restore(contents)
        previous = port_of(read_endpoint(endpoints, ENDPOINT))
        self._server = _bind(keys, host, port, previous=previous, ipc_path=(sockets or endpoints / "ipc") / ENDPOINT)
        self._writer = Writer(self.store)
        self._server.wake_on(self._writer.wake_fd)
        publish_endpoint(endpoints, ENDPOINT, self._server.address, self._server.ipc_path)

    def round(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for messages or for a commit, answer, and do what is due by the clock.

        Raises DiskBroken when the state of the file is no longer known: a new daemon has to read it.
        """
        for client, body, grant in self._server.receive(min(timeout_s, TICK_S)):
            self._send(self.core.receive(client, body, grant, self._clock()))
        self._settle()
        now_s = self._clock()
        is_due = now_s >= self._tick_s
        if is_due:
            self._tick_s = now_s + TICK_S
            self._send(self.core.tick(now_s))
        transaction = self.core.begin(now_s, is_awaited=not is_due)
        if transaction is not None:
            self._writer.post(transaction)
        if self._writer.failure:
            raise DiskBroken(self._writer.failure)

    def stat(self) -> Stat:
        """Return the daemon's account of itself."""
        stat = self.core.stat(self._clock())
        return msgspec.structs.replace(
            stat,
            malformed=dict(Counter(stat.malformed) + Counter(self._server.refusals.counts())),
            undelivered=self.num_undelivered,
            file_bytes=self.store.file_bytes,
            commits=self._writer.num_commits,
            commit_s=self._writer.commit_s,
        )

    def reload_keys(self) -> None:
        """Read the allow-list at once instead of within half a second."""
        self._server.reload()

    def close(self) -> None:
        """Stop listening, and commit what the next daemon should know."""
        self._server.close()
        if self._writer.close(CLOSE_S):
            if self._writer.done() == "":
                self.core.settle("", self._clock())
            last = self.core.begin(self._clock(), is_awaited=False)
            if last is not None and not self._writer.failure:
                with suppress(DiskBroken):
                    self.store.commit(last)
            self.store.close()

    def _settle(self) -> None:
        failure = self._writer.done()
        if failure is not None:
            self._send(self.core.settle(failure, self._clock()))

    def _send(self, out: Outgoing) -> None:
        for client, message in out:
            if not self._server.send(client, encode(self.stat() if isinstance(message, Stat) else message)):
                self.num_undelivered += 1


def _admits(grant: Grant) -> bool:
    return grant.role in CLIENT_ROLES


def _bind(keys: RunKeys, host: str, port: int, *, previous: int, ipc_path: Path) -> ServerSocket:
    """Listen on `port`. For port 0 try the previous port first, so that clients need not search."""
    listen = partial(
        ServerSocket, keys, admits=_admits, host=host, ipc_path=ipc_path, max_unread_messages=MAX_UNREAD_MESSAGES
    )
    if port == 0 and previous:
        with suppress(AddressError):
            return listen(port=previous)
    return listen(port=port)
