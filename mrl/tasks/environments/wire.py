"""Messages between a pool and its environment processes: msgpack, each after its length."""

import struct

import msgspec

from mrl.tasks.environments.contract import LIMITS, EnvironmentTurn, PolicyTurn

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 8 * LIMITS.turn_bytes
"""Longest message: more than a turn with its tools takes. A longer length means that the stream is invalid."""


class OpenEpisode(msgspec.Struct, frozen=True, tag="open"):
    """Begin an episode; the row is JSON."""

    episode: int
    seed: int
    row: str


class StepEpisode(msgspec.Struct, frozen=True, tag="step"):
    """Tells a turn of the policy and asks for the answer."""

    episode: int
    turn: PolicyTurn


class FinishEpisode(msgspec.Struct, frozen=True, tag="finish"):
    """Asks for the reward of an episode that ends from outside."""

    episode: int
    reason: str
    turn: PolicyTurn | None = None
    """The policy's last turn, where it was cut and never answered."""


class DropEpisode(msgspec.Struct, frozen=True, tag="drop"):
    """Close the episode, or break it off where it still runs: nobody awaits it any more."""

    episode: int


class ProcessReady(msgspec.Struct, frozen=True, tag="ready"):
    """First message of a process: its class was found."""


class ProcessBeat(msgspec.Struct, frozen=True, tag="beat"):
    """The process lives, and no code of its episodes blocks it."""

    hanging: int = 0
    """Threads of dropped episodes that do not end."""


class EpisodeReply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer of one episode's environment."""

    episode: int
    turn: EnvironmentTurn


Request = OpenEpisode | StepEpisode | FinishEpisode | DropEpisode
Asked = OpenEpisode | StepEpisode | FinishEpisode
Reply = ProcessReady | ProcessBeat | EpisodeReply
_request = msgspec.msgpack.Decoder(Request)
_reply = msgspec.msgpack.Decoder(Reply)


def framed(message: Request | Reply) -> bytes:
    """Return a message as it goes over a socket."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class Frames:
    """Splits the bytes of a stream into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def bodies(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with this data. Raises ValueError for a length that no message has."""
        self._bytes += data
        found = []
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {length:,} bytes exceeds the limit of {MAX_FRAME_BYTES:,} bytes")
            end = LENGTH.size + length
            if len(self._bytes) < end:
                break
            found.append(bytes(self._bytes[LENGTH.size : end]))
            del self._bytes[:end]
        return found


def read_request(body: bytes) -> Request:
    """Decode a message to a process. Raises msgspec.DecodeError."""
    return _request.decode(body)


def read_reply(body: bytes) -> Reply:
    """Decode a message of a process. Raises msgspec.DecodeError."""
    return _reply.decode(body)
