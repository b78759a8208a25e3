"""What the core needs of the world outside, as narrow as it can be: somebody who writes, somebody who reads a file."""

from collections.abc import Sequence
from typing import Protocol

from mrl.records.codec import Buffer
from mrl.records.packs import Spooled


class Append(Protocol):
    """Begins to put an entry on the log; `ExchangeCore.stored` is told by the ticket how that ended."""

    def __call__(self, ticket: int, entry: Sequence[Buffer], *, is_move: bool) -> None:
        """`entry` comes in parts that belong together.

        `is_move`: it is on the log already, and is written anew so that its old place becomes free.
        """


class Spools(Protocol):
    """Files in which clients of this host leave the records of their Puts."""

    def open(self, client: str) -> bool:
        """Open the file of a client anew; False when it cannot be read."""

    def has(self, client: str) -> bool:
        """Whether the file of this client is open."""

    def read(self, client: str, where: Spooled) -> bytes | None:
        """The bytes that the client means; None when they are not there."""


class NoSpools:
    """For a daemon whose clients send everything."""

    def open(self, client: str) -> bool:
        """Never."""
        return False

    has = open

    def read(self, client: str, where: Spooled) -> bytes | None:
        """Nothing."""
        return None
