"""Who waits for records on which prompt."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from mrl.records.experience import RecordKind

WATCH_BYTES = 900
"""Memory that one watch costs beside the id of its prompt."""
MAX_WATCHES_BYTES = 16 * 1024 * 1024
"""Of all clients: some 17,000 with ids of usual length."""


@dataclass(slots=True, eq=False)
class Watch:
    """One client's open question about one prompt."""

    policy: str
    left: int
    """Records that may still be delivered."""
    max_age_versions: int | None
    kinds: Collection[RecordKind]
    sources: set[str] = field(default_factory=set)
    """Policies that have answered it."""


class Watches:
    """Open questions: `max_per_client` of one client (its oldest goes), `max_total` and 16 MiB in all (refused)."""

    def __init__(self, *, max_per_client: int, max_total: int) -> None:
        self.dropped = 0
        """Watches dropped or refused because there were too many."""
        self._max_per_client, self._max_total = max_per_client, max_total
        self._of_client: dict[bytes, dict[str, Watch]] = {}
        self._of_prompt: dict[str, dict[bytes, Watch]] = {}
        self._total = self._num_bytes = 0

    def __len__(self) -> int:
        return self._total

    def get(self, client: bytes, prompt_id: str) -> Watch | None:
        """The client's watch on this prompt."""
        return self._of_client.get(client, {}).get(prompt_id)

    def add(self, client: bytes, prompt_id: str, watch: Watch) -> None:
        """Open a watch, in place of an earlier one of the same client and prompt."""
        self.remove(client, prompt_id)
        of_client = self._of_client.get(client, {})
        if len(of_client) >= self._max_per_client:
            self.remove(client, next(iter(of_client)))
            self.dropped += 1
        if self._total >= self._max_total or self._num_bytes + _bytes_of(prompt_id) > MAX_WATCHES_BYTES:
            self.dropped += 1
            return
        self._of_client.setdefault(client, {})[prompt_id] = watch
        self._of_prompt.setdefault(prompt_id, {})[client] = watch
        self._total += 1
        self._num_bytes += _bytes_of(prompt_id)

    def remove(self, client: bytes, prompt_id: str) -> None:
        """Close a watch, if there is one."""
        of_client = self._of_client.get(client, {})
        if of_client.pop(prompt_id, None) is None:
            return
        self._total -= 1
        self._num_bytes -= _bytes_of(prompt_id)
        if not of_client:
            del self._of_client[client]
        of_prompt = self._of_prompt[prompt_id]
        del of_prompt[client]
        if not of_prompt:
            del self._of_prompt[prompt_id]

    def forget(self, client: bytes) -> None:
        """Close all watches of a client."""
        for prompt_id in list(self._of_client.get(client, ())):
            self.remove(client, prompt_id)

    def on(self, prompt_id: str, *, not_of: str) -> list[tuple[bytes, Watch]]:
        """The watches on this prompt that belong to other policies than `not_of`."""
        return [item for item in self._of_prompt.get(prompt_id, {}).items() if item[1].policy != not_of]

    def prompts_by_policy(self) -> Counter[str]:
        """How many prompts the clients of each policy watch."""
        return Counter(policy for of_prompt in self._of_prompt.values() for policy in policies_of(of_prompt.values()))


def policies_of(watches: Iterable[Watch]) -> set[str]:
    """Each once."""
    return {watch.policy for watch in watches}


def _bytes_of(prompt_id: str) -> int:
    return WATCH_BYTES + sys.getsizeof(prompt_id)
