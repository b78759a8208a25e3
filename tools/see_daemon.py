"""The exchange daemons of a run, asked with the admin's key."""

import os
import time
from contextlib import ExitStack
from typing import TypeVar

from mrl.config.run_folder import RunFolder
from mrl.errors import PeerLost, RecordError
from mrl.exchange.shards import endpoint_of
from mrl.records.codec import decode, encode
from mrl.records.exchange_messages import ClientMessage, Peeked, Stat, StreamState, daemon_message_decoder
from mrl.transport.client import ClientSocket
from mrl.transport.endpoints import read_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import load_client_keys

ANSWER_S = 2.0
MAX_SHARDS = 64

Answer = TypeVar("Answer", Stat, Peeked)


class Daemon:
    """One daemon; raises RunFolderError when the run has no key for its admin."""

    def __init__(self, run: RunFolder, shard: int) -> None:
        self.shard = shard
        self.name = f"admin/{os.getpid()}"
        keys, endpoint = load_client_keys(run.keys, Grant("admin")), endpoint_of(shard)
        self._socket = ClientSocket(keys, lambda: read_endpoint(run.endpoints, endpoint), identity=self.name)

    def ask(self, question: ClientMessage, kind: type[Answer]) -> Answer:
        """The answer of this kind. Raises PeerLost when none comes within 2 s."""
        end_s = time.monotonic() + ANSWER_S
        is_asked = False
        while time.monotonic() < end_s:
            is_asked = is_asked or self._socket.send(encode(question))
            self._socket.wait(0.05, until_sendable=not is_asked)
            for body in self._socket.receive(0.0):
                if isinstance(answer := _read(body), kind):
                    return answer
        name = f"shard {self.shard}" if self.shard else "no exchange daemon of this run"
        how = "did not answer" if self.shard else "answered"
        raise PeerLost(f"{name} {how} within {ANSWER_S:.0f} s; is the run still going?")

    def close(self) -> None:
        """End the link."""
        self._socket.close()


def connect(run: RunFolder, closing: ExitStack) -> list[Daemon]:
    """All daemons that have ever said where they listen; the first one at least."""
    shards = [shard for shard in range(MAX_SHARDS) if (run.endpoints / f"{endpoint_of(shard)}.json").exists()]
    daemons = []
    for shard in shards or [0]:
        daemons.append(Daemon(run, shard))
        closing.callback(daemons[-1].close)
    return daemons


def left_over(stat: Stat, before: Stat | None) -> list[str]:
    """What a draining daemon still has to do, a line each; `before` is its previous account."""
    counts = {
        "Puts on their way to the log": stat.unstored,
        "records delivered and not acknowledged": stat.claims,
        "records queued for clients": sum(session.queued for session in stat.sessions),
        "requests that nobody has been given": stat.unserved,
    }
    earlier = {(state.policy, state.stream): state for state in before.streams} if before else {}
    streams = [_unread(state, earlier.get((state.policy, state.stream))) for state in stat.streams]
    return [f"{number} {what}" for what, number in counts.items() if number] + [line for line in streams if line]


def _unread(state: StreamState, before: StreamState | None) -> str:
    """What one reader still has to take, or ""."""
    name = f"stream {state.stream} of {state.policy}"
    if not state.reader and (state.waiting or state.took < state.sent):
        return f"{name} is read by nobody, {state.waiting} records behind"
    if state.took < state.sent:
        return f"{name}: {state.reader} has not taken all it was sent"
    # Records that nobody wants count as waiting too: a reader that took all and is sent nothing more has what it wants.
    is_still = before is not None and (before.sent, before.waiting) == (state.sent, state.waiting)
    return f"{name}: {state.waiting} records behind" if state.waiting and not is_still else ""


def _read(body: bytes) -> object:
    try:
        return decode(body, daemon_message_decoder)
    except RecordError:
        return None
