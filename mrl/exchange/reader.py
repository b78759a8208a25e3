"""The client's end of a stream: takes batches in their order, each record once, and knows how far it has come."""

import msgspec

from mrl.records.exchange import Batch, Stream


class Reader:
    """One open stream. `came_to` is the number to go on after, for the daemon and for a checkpoint."""

    def __init__(self, wish: Stream) -> None:
        self._wish = wish
        self.came_to = wish.after

    @property
    def wish(self) -> Stream:
        """The message that opens or renews the stream where it stands now."""
        return msgspec.structs.replace(self._wish, after=self.came_to)

    def new_of(self, batch: Batch) -> list[tuple[int, msgspec.Raw, int]] | None:
        """(number, encoded record, age in versions) of what has not come yet; None when something before it is missing.

        The records count as come: the caller keeps them.
        """
        if batch.previous > self.came_to:
            return None
        rows = zip(batch.numbers, batch.records, batch.ages_versions, strict=False)
        new = [row for row in rows if row[0] > self.came_to]
        self.came_to = max([self.came_to, *batch.numbers])
        return new
