"""What the log has of every client: the numbers of its Puts, and hashes of the ids of what it put last.

A client that says nothing but the same Put again is known by the number of the Put. One that was killed comes back
under other numbers, in other packs, with all that it was not told to be stored: what follows its Hello is compared, by
the ids, with what it had put before, for as long as it may still have had that unanswered.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MAX_CLIENTS = 4096
MAX_PUTS = 1024
"""Of one client: more than a client has unanswered."""
WINDOW_BYTES = 16 * 1024 * 1024
WINDOW_PUTS = 512
"""What a client may have unanswered: so much of what it put last is known by its ids."""
MAX_IDS = 262_144
"""Of all clients together, those included that are compared: most of them are in every snapshot of the log."""

Hashes = npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Window:
    """What one client put last, and with what of it the Puts of its present life are compared."""

    puts: deque[tuple[int, bytes]] = field(default_factory=deque)
    """(bytes of the records, hashes of their ids), the newest at the end."""
    num_bytes: int = 0
    earlier: Hashes | None = None
    """What it had put before it came back, sorted; None once it cannot come again."""
    is_back: bool = False
    """Whether it has said Hello since, and put nothing yet."""
    since_bytes: int = 0
    since_puts: int = 0
    """What was stored of it since it came back."""

    def hashes(self) -> Hashes | None:
        """Of all ids, sorted; None when there are none."""
        found = np.sort(np.frombuffer(b"".join(hashes for _, hashes in self.puts), np.uint64))
        return found if found.size else None


class StoredPuts:
    """Remembers as much of each client as may come again."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {}
        """Client -> number of a Put -> records of it that were stored; clients by when they put last."""
        self._windows: dict[str, _Window] = {}
        self._num_ids = 0

    def num_stored(self, client: str, seq: int) -> int | None:
        """Records of a Put that were stored when it came before; None when it is new."""
        return self._counts.get(client, {}).get(seq)

    def note(self, client: str, seq: int, num_stored: int, num_bytes: int, id_hashes: bytes) -> None:
        """So many records of this Put are on the log, `num_bytes` long together."""
        self._note_count(client, seq, num_stored)
        self._note_ids(client, num_bytes, id_hashes)

    def restore(
        self, counts: Mapping[str, Mapping[int, int]], windows: Iterable[tuple[str, Sequence[tuple[int, bytes]]]]
    ) -> None:
        """Know again what `counts` and `windows` said of an earlier daemon."""
        for client, puts in counts.items():
            for seq, num_stored in puts.items():
                self._note_count(client, seq, num_stored)
        for client, window in windows:
            for num_bytes, id_hashes in window:
                self._note_ids(client, num_bytes, id_hashes)

    def begin_life(self, client: str) -> None:
        """The client has said Hello: it may be another process than the one that put before."""
        self._window(client).is_back = True

    def doubles(self, client: str, id_hashes: bytes) -> list[bool] | None:
        """Which of these ids an earlier life of the client has stored; None when there are none."""
        window = self._windows.get(client)
        if window is None:
            return None
        if window.is_back:
            self._compare_with(window, window.hashes())
            window.is_back, window.since_bytes, window.since_puts = False, 0, 0
        if window.earlier is None:
            return None
        asked = np.frombuffer(id_hashes, np.uint64)
        places = np.minimum(np.searchsorted(window.earlier, asked), window.earlier.size - 1)
        found = window.earlier[places] == asked
        return found.tolist() if found.any() else None

    def counts(self) -> dict[str, dict[int, int]]:
        """Client -> numbers of its Puts that were stored last -> records of them."""
        return {client: dict(puts) for client, puts in self._counts.items()}

    def windows(self) -> Iterator[tuple[str, Sequence[tuple[int, bytes]]]]:
        """(client, (bytes, hashes) of what it put last), by when they were heard of last."""
        for client, window in self._windows.items():
            if window.puts:
                yield client, list(window.puts)

    def _note_count(self, client: str, seq: int, num_stored: int) -> None:
        puts = self._counts[client] = self._counts.pop(client, {})
        puts[seq] = num_stored
        if len(puts) > MAX_PUTS:
            del puts[next(iter(puts))]
        if len(self._counts) > MAX_CLIENTS:
            del self._counts[next(iter(self._counts))]

    def _note_ids(self, client: str, num_bytes: int, id_hashes: bytes) -> None:
        window = self._window(client)
        window.puts.append((num_bytes, id_hashes))
        window.num_bytes += num_bytes
        window.since_bytes += num_bytes
        window.since_puts += 1
        self._num_ids += _count(id_hashes)
        if window.since_bytes > WINDOW_BYTES or window.since_puts > WINDOW_PUTS:
            self._compare_with(window, None)
        while len(window.puts) > WINDOW_PUTS or (window.num_bytes > WINDOW_BYTES and len(window.puts) > 1):
            self._drop_oldest(window)
        self._forget_beyond_bound()

    def _compare_with(self, window: _Window, earlier: Hashes | None) -> None:
        self._num_ids += _size(earlier) - _size(window.earlier)
        window.earlier = earlier

    def _forget_beyond_bound(self) -> None:
        """Of whoever has been silent longest."""
        while self._num_ids > MAX_IDS:
            client, window = next(iter(self._windows.items()))
            if window.earlier is not None:
                self._compare_with(window, None)
            elif window.puts:
                self._drop_oldest(window)
            else:
                del self._windows[client]

    def _window(self, client: str) -> _Window:
        """Of a client that is heard of now."""
        window = self._windows[client] = self._windows.pop(client) if client in self._windows else _Window()
        if len(self._windows) > MAX_CLIENTS:
            gone = self._windows.pop(next(iter(self._windows)))
            self._compare_with(gone, None)
            self._num_ids -= sum(_count(id_hashes) for _, id_hashes in gone.puts)
        return window

    def _drop_oldest(self, window: _Window) -> None:
        num_bytes, id_hashes = window.puts.popleft()
        window.num_bytes -= num_bytes
        self._num_ids -= _count(id_hashes)


def _size(hashes: Hashes | None) -> int:
    return 0 if hashes is None else hashes.size


def _count(id_hashes: bytes) -> int:
    return len(id_hashes) // 8
