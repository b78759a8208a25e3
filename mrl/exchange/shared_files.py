"""What a client shares with a daemon of its own host beside the socket: its spool, and the daemon's log."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from mrl.exchange.log.places import Places
from mrl.exchange.spool import Spool, spool_path
from mrl.records.codec import Buffer
from mrl.records.packs import Spooled

Locate = Callable[[], Path | None]
"""The folder of the daemon, while it runs on this host."""


class SharedFiles:
    """Nothing is shared while the daemon is elsewhere, or its folder not accessible. Used under the client's lock."""

    def __init__(self, locate: Locate, client: str) -> None:
        self.is_spool_read = False
        """Whether the daemon has said that it reads the spool."""
        self._locate, self._client = locate, client
        self._folder: Path | None = None
        self._spool: Spool | None = None
        self._places: Places | None = None

    @property
    def has_spool(self) -> bool:
        """Whether there is a spool for the daemon to read."""
        return self._spool is not None and self._folder is not None

    @property
    def has_log(self) -> bool:
        """Whether the daemon's log can be read from here, as far as anybody knows."""
        return self._places is not None

    def look(self) -> None:
        """See where the daemon is now."""
        folder = self._locate()
        if folder == self._folder:
            return
        self._folder, self.is_spool_read = folder, False
        if self._places is not None:
            self._places.close()
        self._places = Places(folder) if folder is not None else None
        if self._spool is None and folder is not None:
            with contextlib.suppress(OSError):
                self._spool = Spool(spool_path(folder, self._client))

    def forget_log(self) -> None:
        """There is a new daemon: what was seen of the folder may have changed."""
        if self._places is not None:
            self._places.close()

    def read_log(self, place: int, num_bytes: int) -> bytes | None:
        """What stands on the log; None when that cannot be told."""
        return self._places.read(place, num_bytes) if self._places is not None else None

    def write(self, seq: int, parts: Sequence[Buffer]) -> Spooled | None:
        """Leave what belongs to Put `seq` for the daemon; None when it has to be sent."""
        return self._spool.write(seq, parts) if self._spool is not None and self.is_spool_read else None

    def read_back(self, where: Spooled) -> bytes | None:
        """What was left there, as long as it was not freed."""
        return self._spool.read_back(where) if self._spool is not None else None

    def free(self, seq: int) -> None:
        """Put `seq` was answered, or is given up."""
        if self._spool is not None:
            self._spool.free(seq)

    def close(self) -> None:
        """Remove the spool, and let go of the log."""
        self.forget_log()
        if self._spool is not None:
            self._spool.close()
            self._spool = None
