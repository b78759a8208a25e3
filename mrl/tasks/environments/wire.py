"""What a pool and its environment processes say to each other: msgpack, each message behind its length."""

import struct

import msgspec

from mrl.tasks.environments.contract import LIMITS, EnvironmentTurn, PolicyTurn

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 8 * LIMITS.turn_bytes
"""More than a turn with its tools takes; what claims to be longer is no message."""


class OpenEpisode(msgspec.Struct, frozen=True, tag="open"):
    """Begin an episode; the row is JSON."""

    episode: int
    seed: int
    row: str


class StepEpisode(msgspec.Struct, frozen=True, tag="step"):
    """A turn of the policy."""

    episode: int
    turn: PolicyTurn


class FinishEpisode(msgspec.Struct, frozen=True, tag="finish"):
    """The reward, please: the episode ends from outside."""

    episode: int
    reason: str
    turn: PolicyTurn | None = None
    """What the policy said last, where that was cut and never answered."""


class DropEpisode(msgspec.Struct, frozen=True, tag="drop"):
    """Nobody awaits it any more: close it, or where it still runs, break it off."""

    episode: int


class ProcessReady(msgspec.Struct, frozen=True, tag="ready"):
    """The first message of a process: its class is there."""


class ProcessBeat(msgspec.Struct, frozen=True, tag="beat"):
    """A process lives, and code of its episodes does not keep it from saying so."""

    hanging: int = 0
    """Threads of episodes that nobody awaits any more, which do not end."""


class EpisodeReply(msgspec.Struct, frozen=True, tag="reply"):
    """What the environment of one episode gave."""

    episode: int
    turn: EnvironmentTurn


Request = OpenEpisode | StepEpisode | FinishEpisode | DropEpisode
Asked = OpenEpisode | StepEpisode | FinishEpisode
Reply = ProcessReady | ProcessBeat | EpisodeReply
_request = msgspec.msgpack.Decoder(Request)
_reply = msgspec.msgpack.Decoder(Reply)


def framed(message: Request | Reply) -> bytes:
    """A message as it goes over a socket."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class Frames:
    """Bytes of a stream -> messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def bodies(self, data: bytes) -> list[bytes]:
        """The messages that are whole with this. Raises ValueError for a length that no message has."""
        self._bytes += data
        found = []
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {length:,} bytes")
            end = LENGTH.size + length
            if len(self._bytes) < end:
                break
            found.append(bytes(self._bytes[LENGTH.size : end]))
            del self._bytes[:end]
        return found


def read_request(body: bytes) -> Request:
    """A message to a process. Raises msgspec.DecodeError."""
    return _request.decode(body)


def read_reply(body: bytes) -> Reply:
    """A message of a process. Raises msgspec.DecodeError."""
    return _reply.decode(body)
