"""Whole groups of peers (rollouts, values or votes) on the prompts of own groups.

    own group arrives ──▶ open ──▶ every peer has answered: settled
                              └──▶ the own group is trained with the answers so far; later answers are late

Peers are optional: a prompt that nobody answered is trained alone. Only the cumulative counts outlive a restart: own
groups that were not trained are sampled again, and asked for again.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from mrl.config.table import Table
from mrl.records.experience import Received, RecordKind, kind_of
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.regime import PeerQuery, PeerWait


class PeerGroupParameters(Table):
    """The keys of every regime that reads groups of peers."""

    max_age_versions: int = Field(4, ge=0)
    """Groups of peers older than this are ignored."""
    peer_hold_versions: int = Field(1, ge=0)
    """Steps for which an own group that not every peer has answered may be passed over."""
    peer_wait_s: float = Field(1.0, ge=0)
    """Longest wait of a batch for the peers' groups."""


class PeerGroups:
    """The newest record of every peer for each open prompt.

    A prompt is closed once its own groups are too stale to be trained on: dropped groups are never taken, and the
    peers' records about them would fill the memory. At most `max_prompts` are open; beyond that the least recently
    opened prompt is closed. Where several own groups are open on a prompt, records that are trained on go to the first
    group alone; rewards and votes go to all of them.
    """

    def __init__(
        self,
        kind: RecordKind,
        *,
        policy: str,
        peers: Sequence[str],
        max_age_versions: int,
        max_staleness_versions: int = sys.maxsize,
        max_prompts: int = 4096,
    ) -> None:
        """`max_staleness_versions` is the staleness bound of own groups."""
        self._kind, self._policy, self._peers = kind, policy, frozenset(peers)
        self._max_age_versions, self._max_prompts = max_age_versions, max_prompts
        self._max_staleness_versions = max_staleness_versions
        self._open: dict[str, dict[str, Received]] = {}
        self._waiting: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Open prompt -> ticket of each own group on it that was not trained yet -> step of the version of that
        group."""
        self._newest_step = 0
        self._forget: dict[str, None] = {}
        self._counts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()

    @property
    def prompt_ids(self) -> list[str]:
        """Open prompts, least recently opened first."""
        return list(self._open)

    def open(self, group: ScoredGroup) -> list[str]:
        """Open the prompt of an own group that has arrived. Return the prompts to ask for."""
        self._open[group.prompt_id] = self._open.pop(group.prompt_id, {})
        self._waiting[group.prompt_id][group.ticket] = group.newest.step
        self._newest_step = max(self._newest_step, group.newest.step)
        while self._open and (len(self._open) > self._max_prompts or self._is_over(next(iter(self._open)))):
            self._close(next(iter(self._open)))
        return [group.prompt_id]

    def hear(self, received: Sequence[Received]) -> None:
        """Keep the newest record of each peer for open prompts. Every other record is counted by reason."""
        for item in received:
            reason = self._ignore_reason(item)
            if reason:
                self._counts[reason] += 1
                continue
            of_prompt = self._open[item.record.prompt_id]
            held = of_prompt.get(item.record.source)
            if held is None or held.record.newest < item.record.newest:
                of_prompt[item.record.source] = item

    def is_settled(self, prompt_id: str) -> bool:
        """Whether every peer has answered about the prompt. A closed prompt is settled."""
        return prompt_id not in self._open or self._peers <= self._open[prompt_id].keys()

    def take(self, prompt_id: str) -> list[Received]:
        """Return the records of the prompt for one own group, by name of the peer; count whether any peer answered.

        The prompt is closed, unless another own group waits for the same rewards or votes. A waiting group that is
        older than records may be was dropped, and waits no more.
        """
        found = self._open.get(prompt_id, {})
        self._totals["asked"] += 1
        self._counts["asked"] += 1
        self._counts["hit"] += bool(found)
        self._totals["hit"] += bool(found)
        self._counts.update(f"hit_from/{source}" for source in found)
        self._totals.update(f"hit_from/{source}" for source in found)
        oldest = self._newest_step - self._max_age_versions
        waiting = sorted(self._waiting[prompt_id].items(), key=lambda one: one[1])[1:]
        self._waiting[prompt_id] = {ticket: step for ticket, step in waiting if step >= oldest}
        if self._kind not in ("value", "vote") or not self._waiting[prompt_id]:
            self._close(prompt_id)
        return [found[source] for source in sorted(found)]

    def take_forgotten(self) -> list[str]:
        """Return the prompts that were closed since the last call and are not open again."""
        forgotten = [prompt_id for prompt_id in self._forget if prompt_id not in self._open]
        self._forget.clear()
        return forgotten

    def take_counts(self) -> dict[str, float]:
        """Return metrics: the events since the last call, and the cumulative rates once defined."""
        counts, self._counts = self._counts, Counter()
        values = {f"sharing/{name}_prompts": float(counts[name]) for name in ("asked", "hit")}
        values |= {f"regime/ignored_{r}": float(counts[r]) for r in ("late", "own", "stale", "other") if counts[r]}
        if counts["asked"]:
            values |= {f"sharing/hit_prompts_from/{one}": float(counts[f"hit_from/{one}"]) for one in self._peers}
        asked = self._totals["asked"]
        if asked:
            values["sharing/hit_rate"] = self._totals["hit"] / asked
            for source in sorted(self._peers):
                values[f"sharing/hit_rate_from/{source}"] = self._totals[f"hit_from/{source}"] / asked
        return values

    def state(self) -> dict[str, Any]:
        """Return the totals behind the cumulative rates, as JSON values."""
        return dict(self._totals)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the totals from `state()`."""
        self._totals = Counter(state)

    def _ignore_reason(self, item: Received) -> str:
        record = item.record
        if record.source == self._policy:
            return "own"
        if kind_of(record) != self._kind or record.source not in self._peers:
            return "other"
        if item.age_versions > self._max_age_versions:
            return "stale"
        return "" if record.prompt_id in self._open else "late"

    def _is_over(self, prompt_id: str) -> bool:
        """Whether all own groups on an open prompt are too stale: the learner is at the newest step, or beyond."""
        newest = max(self._waiting[prompt_id].values())
        return self._newest_step - newest > self._max_staleness_versions

    def _close(self, prompt_id: str) -> None:
        self._waiting.pop(prompt_id, None)
        if self._open.pop(prompt_id, None) is not None:
            self._forget[prompt_id] = None


class PeerGroupReader:
    """The part of a regime that asks peers for their groups on every own prompt, and waits for them within a bound."""

    def __init__(self, kind: RecordKind, parameters: PeerGroupParameters, context: SharingContext) -> None:
        self.context, age = context, parameters.max_age_versions
        sources = (*context.peers, *context.replayed)
        self.asking: PeerQuery | None = PeerQuery((kind,), max(1, len(sources)), age)
        self.patience: PeerWait | None = PeerWait(parameters.peer_hold_versions, parameters.peer_wait_s)
        self.peer_groups = PeerGroups(
            kind,
            policy=context.policy,
            peers=sources,
            max_age_versions=age,
            max_staleness_versions=context.max_staleness_versions,
        )

    def asks(self, group: ScoredGroup) -> list[str]:
        """Return the prompt of every own group."""
        return self.peer_groups.open(group)

    def awaited(self) -> list[str]:
        """Return the prompts of own groups that were not trained yet."""
        return self.peer_groups.prompt_ids

    def hear(self, received: Sequence[Received], *, step: int) -> None:
        """Keep the newest group of every peer."""
        self.peer_groups.hear(received)

    def is_settled(self, group: ScoredGroup) -> bool:
        """Whether every peer has answered about the prompt of `group`."""
        return self.peer_groups.is_settled(group.prompt_id)

    def state(self) -> dict[str, Any]:
        """Return the totals behind the cumulative rates. Records that were heard are asked for again."""
        return {"totals": self.peer_groups.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.peer_groups.restore(state["totals"])
