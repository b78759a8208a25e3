"""The exchange daemon: core, log and server socket put together, one round at a time."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from mrl.errors import AddressError, RecordError
from mrl.exchange.core import ExchangeCore, Outgoing
from mrl.exchange.log import ExchangeLog
from mrl.records.codec import decode, decoder, encode
from mrl.records.exchange import Announce, Done, Stat
from mrl.records.experience import ExperienceRecord
from mrl.transport.endpoints import port_of, publish_endpoint, read_endpoint
from mrl.transport.keys import RunKeys
from mrl.transport.server import ServerSocket

ENDPOINT = "exchange"
COMPACT_PAUSE_S = 30.0

_entry_decoder: msgspec.msgpack.Decoder[ExperienceRecord | Announce | Done] = decoder(
    ExperienceRecord | Announce | Done
)


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
        budget_bytes: int,
        per_prompt: int,
        max_age_versions: int,
        clock: Callable[[], float],
    ) -> None:
        """Replay the log, listen, and publish where. Raises RunFolderError or AddressError when that cannot be done."""
        self.undelivered = 0
        """Messages whose receiver was gone or did not keep up."""
        self.unreadable = 0
        """Log entries of another schema, skipped at the start."""
        self._clock = clock
        self._compact_not_before_s = clock()
        self.log = ExchangeLog(folder)
        self.core = ExchangeCore(
            incarnation=secrets.token_hex(8),
            budget_bytes=budget_bytes,
            per_prompt=per_prompt,
            max_age_versions=max_age_versions,
            journal=self.log.append,
            started_s=clock(),
        )
        self.core.restore(self._logged())
        self._server = _bind(keys, host, port, previous=port_of(read_endpoint(endpoints, ENDPOINT)))
        publish_endpoint(endpoints, ENDPOINT, self._server.address)

    def round(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for messages, answer them, and do what the time asks for."""
        now_s = self._clock()
        for client, body in self._server.receive(timeout_s):
            now_s = self._clock()
            self._send(self._stamped(self.core.receive(client, body, now_s)))
        self._send(self.core.tick(now_s))
        if now_s >= self._compact_not_before_s and self.log.is_wasteful(self.core.shelf.payload_bytes):
            self._compact_not_before_s = now_s + COMPACT_PAUSE_S
            self.log.compact(self.core.snapshot())

    def stat(self) -> Stat:
        """The daemon's account of itself."""
        self.core.malformed["frames"] = self._server.malformed
        self.core.malformed["handshake"] = self._server.refused_handshakes
        return msgspec.structs.replace(self.core.stat(self._clock()), log_bytes=self.log.size_bytes)

    def close(self) -> None:
        """Stop listening and flush the log."""
        self._server.close()
        self.log.close()

    def _logged(self) -> Iterator[ExperienceRecord | Announce | Done]:
        for payload in self.log.replay():
            try:
                yield decode(payload, _entry_decoder)
            except RecordError:
                self.unreadable += 1

    def _stamped(self, out: Outgoing) -> Outgoing:
        return [(client, self.stat() if isinstance(message, Stat) else message) for client, message in out]

    def _send(self, out: Outgoing) -> None:
        for client, message in out:
            if not self._server.send(client, encode(message)):
                self.undelivered += 1


def _bind(keys: RunKeys, host: str, port: int, *, previous: int) -> ServerSocket:
    """Listen on `port`; when any port will do, on the previous one if it is free, so that clients need not search."""
    if port == 0 and previous:
        try:
            return ServerSocket(keys, host=host, port=previous)
        except AddressError:
            return ServerSocket(keys, host=host)
    return ServerSocket(keys, host=host, port=port)
