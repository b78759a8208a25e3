"""Every bound of the exchange in one table. That they fit together is asserted when a table is made."""

from dataclasses import dataclass
from typing import Literal

from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.records.experience import RecordKind

KIB, MIB = 1024, 1024 * 1024

Durability = Literal["synced", "written"]

HELD_OVERHEAD_BYTES = 1536
"""Memory that one held record costs beyond its encoded form: tags, keys, indices (a test measures it)."""
GAP_SHARE = 16
"""One part in so many of what is held lies in gaps of the heap, where long and short records come and go."""
WATCH_OVERHEAD_BYTES = 900
"""Memory that one watch costs beside the id of its prompt (a test measures it)."""
REMEMBERED_BYTES = 250
"""Memory that the id of a record costs which is held no longer."""
BESIDE_BUDGET_BYTES = 150 * MIB
"""Resident memory of the daemon beside the budget."""
PROCESS_BYTES = 60 * MIB
"""Of these, the interpreter and its libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the daemon may take of memory, disk and time. Defaults but the first four are not configured."""

    budget_bytes: int = 256 * MIB
    """Records held: in memory and, once committed, in the file."""
    durability: Durability = "synced"
    """Whether a record is acknowledged once it is on the disk, or once the kernel has it."""
    successes_per_prompt: int = 4
    """Kept of every policy and prompt."""
    max_age_versions: int = 200

    window_bytes: int = 4 * MIB
    """Puts that one client may have unacknowledged."""
    min_window_bytes: int = 512 * KIB
    """The same where many clients share `windows_bytes`."""
    windows_bytes: int = 16 * MIB
    """Puts that all clients together may have unacknowledged, as long as they keep to what they are told."""
    unstored_bytes: int = 24 * MIB
    """Puts that are not committed: beyond this a Put is answered with Later, whoever sent it."""
    deliver_bytes: int = 512 * KIB
    """Records of one message, unless a single one is longer."""
    unacknowledged_bytes: int = 4 * MIB
    """Delivered to one client and not acknowledged; one message is always allowed."""
    all_unacknowledged_bytes: int = 12 * MIB
    queued_records: int = 4096
    """For one client, behind what it has not acknowledged."""
    watches_per_client: int = 4096
    watches_bytes: int = 16 * MIB
    clients: int = 4096
    policies: int = 1024
    remembered_ids: int = 32_768
    """Ids of records that are held no longer, and are not stored again."""

    def __post_init__(self) -> None:
        assert self.min_window_bytes <= self.window_bytes <= self.windows_bytes <= self.unstored_bytes, self
        assert self.deliver_bytes <= self.unacknowledged_bytes <= self.all_unacknowledged_bytes, self
        assert self.unstored_bytes >= MAX_MESSAGE_BYTES, self
        assert self.beside_budget_bytes <= BESIDE_BUDGET_BYTES, self

    @property
    def beside_budget_bytes(self) -> int:
        """Memory at the worst moment, beside the budget: what comes, what goes, who waits, and what is remembered."""
        incoming = self.unstored_bytes + MAX_MESSAGE_BYTES
        return (
            PROCESS_BYTES
            + incoming
            + self.all_unacknowledged_bytes
            + self.watches_bytes
            + self.remembered_ids * REMEMBERED_BYTES
        )

    def quota(self, kind: RecordKind) -> int:
        """Records kept of a type, source and prompt. Of groups the newest is enough: it is the least stale."""
        most = self.successes_per_prompt
        of_groups: dict[RecordKind, int] = {"rollout": 1, "value": 1, "vote": 1}
        return ({"outcome": most, "episode": most, "score_request": 4, "score": 4} | of_groups)[kind]

    def window_of(self, num_clients: int) -> int:
        """What each of so many clients may have unacknowledged."""
        share = self.windows_bytes // max(1, num_clients)
        return min(self.window_bytes, max(self.min_window_bytes, share))

    def fits(self, num_bytes: int) -> bool:
        """Whether a record of this encoded size can be held at all."""
        return held_bytes_of(num_bytes) <= self.budget_bytes


def held_bytes_of(num_bytes: int) -> int:
    """What a record of this encoded size counts against the budget."""
    return num_bytes + num_bytes // GAP_SHARE + HELD_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What a client may take of its process."""

    put_bytes: int = 512 * KIB
    """A Put of this length is sent without waiting for more records."""
    unacknowledged_bytes: int = 16 * MIB
    """Records published and not acknowledged; beyond this the oldest are dropped and counted."""
    small_puts: int = 2
    """While so many Puts are unanswered, more records are gathered in the next one."""
    gather_s: float = 0.02
    """No record is gathered longer than this."""
    fetch_prompts: int = 1024
    """Prompts of one Fetch."""
    awaited_prompts: int = 32
    """Prompts of one Fetch whose answer is waited for: few, so that no answer outgrows the queues on its way."""
    fetches: int = 256
    """Unanswered ones; the oldest that nobody waits for go."""
    watches: int = 4096
    inbox_records: int = 16_384
    inbox_bytes: int = 256 * MIB
    """What comes while a learner trains waits: two steps of long answers of several peers."""
    seen_prompts: int = 65_536
    """Prompts of which the ids of delivered records are remembered."""

    def __post_init__(self) -> None:
        assert self.put_bytes <= self.unacknowledged_bytes, self
        assert self.put_bytes <= Limits().min_window_bytes, self
        assert self.awaited_prompts <= self.fetch_prompts <= self.watches <= Limits().watches_per_client, self
