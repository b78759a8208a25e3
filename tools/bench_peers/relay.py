"""The limit: records as ready bytes over plain sockets, through a loop that passes on whatever the kernel has.

Nothing is encoded or decoded, kept or acknowledged. Settings: `port`.
"""

import socket
import struct
from collections.abc import Iterator, Sequence

from bench_peers.loads import Checklist
from bench_peers.part import DEADLINE_S, Settings, Stamp, stamp
from mrl.records.codec import decode, encode
from mrl.records.experience import ExperienceRecord, experience_decoder

BLOCK_BYTES = 1024 * 1024
LENGTH = struct.Struct("<I")
TO_READ, TO_WRITE = b"r", b"w"


def serve(settings: Settings) -> Iterator[Settings]:
    """Pass bytes on from the one that writes to the one that reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield {"port": listener.getsockname()[1]}
        ends: dict[bytes, socket.socket] = {}
        while len(ends) < 2:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ends[connection.recv(1)] = connection
    block = memoryview(bytearray(BLOCK_BYTES))
    while length := ends[TO_WRITE].recv_into(block):
        ends[TO_READ].sendall(block[:length])
        yield settings


def connect(settings: Settings, role: bytes) -> socket.socket:
    """A connection that says what it is for."""
    connection = socket.create_connection(("127.0.0.1", int(str(settings["port"]))), timeout=DEADLINE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(role)
    return connection


class Producer:
    """Writes a length and the bytes."""

    def __init__(self, settings: Settings) -> None:
        self._socket = connect(settings, TO_WRITE)

    def prepare(self, records: Sequence[ExperienceRecord]) -> Sequence[bytes]:
        """All bytes are made beforehand."""
        return [LENGTH.pack(len(body)) + body for body in map(encode, records)]

    def send(self, part: Sequence[bytes], *, is_paced: bool) -> None:
        """Waits until the kernel has them."""
        self._socket.sendall(b"".join(part))

    def finish(self) -> None:
        """Nothing is acknowledged."""

    def acknowledgements(self) -> list[tuple[int, float]]:
        """None."""
        return []

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class Consumer:
    """Cuts what comes into records, and looks into them when the clock has stopped."""

    def __init__(self, settings: Settings) -> None:
        self._socket = connect(settings, TO_READ)
        self._block = bytearray(2 * BLOCK_BYTES)
        self._filled = 0
        """Bytes at the front of the block that are no whole record yet."""

    def take_all(self, checklist: Checklist) -> Stamp:
        """Raises TimeoutError when nothing comes for a minute."""
        bodies: list[bytes] = []
        while len(bodies) < checklist.num_missing:
            bodies += self._receive()
        last = stamp()
        checklist.tick_off(decode(body, experience_decoder) for body in bodies)
        return last

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _receive(self) -> Iterator[bytes]:
        """The records that are whole after the next read."""
        view = memoryview(self._block)
        received = self._socket.recv_into(view[self._filled :])
        if not received:
            raise RuntimeError("the relay has ended")
        end, begin = self._filled + received, 0
        while begin + LENGTH.size <= end:
            record = begin + LENGTH.size
            (length,) = LENGTH.unpack_from(self._block, begin)
            if record + length > end:
                break
            yield bytes(view[record : record + length])
            begin = record + length
        self._filled = end - begin
        self._block[: self._filled] = self._block[begin:end]
