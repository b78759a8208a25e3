"""Every bound of the exchange in one table. Making a table asserts that its bounds fit together."""

from dataclasses import dataclass
from typing import Literal

from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.records.experience import RecordKind

KIB, MIB = 1024, 1024 * 1024

Durability = Literal["synced", "written"]

HELD_OVERHEAD_BYTES = 1536
"""Bytes of memory that a record held costs beyond its encoded form: tags, keys, indices (a test measures it)."""
GAP_SHARE = 16
"""Encoded bytes for each byte lost in gaps of the heap, which arise where long and short records come and go."""
WATCH_OVERHEAD_BYTES = 900
"""Bytes of memory that one watch costs beside the id of its prompt (a test measures it)."""
REMEMBERED_BYTES = 250
"""Bytes of memory that the remembered id of a removed record costs."""
BESIDE_BUDGET_BYTES = 150 * MIB
"""Resident memory of the daemon beside the budget, in bytes."""
PROCESS_BYTES = 60 * MIB
"""Part of BESIDE_BUDGET_BYTES for the interpreter and its libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the daemon's memory, disk and time. The configuration sets the first four only."""

    budget_bytes: int = 256 * MIB
    """Bytes of records held: in memory and, once committed, in the file."""
    durability: Durability = "synced"
    """Whether a record is acknowledged once it is on the disk, or once the kernel has it."""
    successes_per_prompt: int = 4
    """Outcomes, and episodes, kept of every policy and prompt."""
    max_age_versions: int = 200
    """Age beyond which a record is removed."""

    window_bytes: int = 4 * MIB
    """Bytes of Puts that one client may have unacknowledged."""
    min_window_bytes: int = 512 * KIB
    """Least window of a client where many clients share `windows_bytes`."""
    windows_bytes: int = 16 * MIB
    """Bytes of Puts that the windows of all clients share."""
    unstored_bytes: int = 24 * MIB
    """Bytes of Puts that are not committed. Beyond this a Put is answered with Later, whoever sent it."""
    deliver_bytes: int = 512 * KIB
    """Bytes of records in one message, unless a single record is longer."""
    unacknowledged_bytes: int = 4 * MIB
    """Bytes delivered to one client and not acknowledged; one message is always allowed."""
    all_unacknowledged_bytes: int = 12 * MIB
    """Bytes delivered to all clients together and not acknowledged."""
    queued_records: int = 4096
    """Records that wait for one client behind those that it has not acknowledged."""
    watches_per_client: int = 4096
    watches_bytes: int = 16 * MIB
    """Bytes of memory of all watches."""
    clients: int = 4096
    policies: int = 1024
    remembered_ids: int = 32_768
    """Ids of removed records that are remembered, so that these are not stored again."""

    def __post_init__(self) -> None:
        assert self.min_window_bytes <= self.window_bytes <= self.windows_bytes <= self.unstored_bytes, self
        assert self.deliver_bytes <= self.unacknowledged_bytes <= self.all_unacknowledged_bytes, self
        assert self.unstored_bytes >= MAX_MESSAGE_BYTES, self
        assert self.beside_budget_bytes <= BESIDE_BUDGET_BYTES, self

    @property
    def beside_budget_bytes(self) -> int:
        """Greatest memory beside the budget, in bytes: Puts, deliveries, watches, and remembered ids."""
        incoming = self.unstored_bytes + MAX_MESSAGE_BYTES
        return (
            PROCESS_BYTES
            + incoming
            + self.all_unacknowledged_bytes
            + self.watches_bytes
            + self.remembered_ids * REMEMBERED_BYTES
        )

    def quota(self, kind: RecordKind) -> int:
        """Return how many records of a type, source and prompt are kept.

        Of groups the newest is enough: it is the least stale.
        """
        most = self.successes_per_prompt
        of_groups: dict[RecordKind, int] = {"rollout": 1, "value": 1, "vote": 1}
        return ({"outcome": most, "episode": most, "score_request": 4, "score": 4} | of_groups)[kind]

    def window_of(self, num_clients: int) -> int:
        """Return the bytes of Puts that each of `num_clients` clients may have unacknowledged."""
        share = self.windows_bytes // max(1, num_clients)
        return min(self.window_bytes, max(self.min_window_bytes, share))

    def fits(self, num_bytes: int) -> bool:
        """Whether a record of this encoded size can be held at all."""
        return held_bytes_of(num_bytes) <= self.budget_bytes


def held_bytes_of(num_bytes: int) -> int:
    """Return the bytes that a record of this encoded size counts against the budget."""
    return num_bytes + num_bytes // GAP_SHARE + HELD_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds of a client: its memory and its messages."""

    put_bytes: int = 512 * KIB
    """Bytes of records at which a Put is sent without waiting for more records."""
    unacknowledged_bytes: int = 16 * MIB
    """Bytes of records published and not acknowledged; beyond this the oldest are dropped and counted."""
    small_puts: int = 2
    """While this many Puts are unanswered, more records are gathered in the next one."""
    gather_s: float = 0.02
    """Seconds for which a record is gathered at most."""
    fetch_prompts: int = 1024
    """Prompts of one Fetch."""
    awaited_prompts: int = 32
    """Prompts of one Fetch for which a caller waits: few, so that no answer outgrows the queues on its way."""
    fetches: int = 256
    """Unanswered Fetches; beyond this the oldest for which no caller waits are dropped."""
    watches: int = 4096
    """Prompts that are watched; beyond this the oldest watches end."""
    inbox_records: int = 16_384
    inbox_bytes: int = 256 * MIB
    """Bytes of records that may wait while a learner trains: two steps of long answers of several peers."""
    seen_prompts: int = 65_536
    """Prompts of which the ids of delivered records are remembered."""

    def __post_init__(self) -> None:
        assert self.put_bytes <= self.unacknowledged_bytes, self
        assert self.put_bytes <= Limits().min_window_bytes, self
        assert self.awaited_prompts <= self.fetch_prompts <= self.watches <= Limits().watches_per_client, self
