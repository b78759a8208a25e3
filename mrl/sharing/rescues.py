"""The bounded table of prompts on which an own group failed as a whole and a peer's success is awaited.

    failed ──▶ pending ──▶ hit          a peer's success was received in time and is trained on
                      ├──▶ expired      too old, or the table overflowed (least recently failed first)
                      └──▶ superseded   a newer, or equally new, own group had a success

asked = hit + expired + superseded + pending, over all prompts that ever entered. Settled = hit or expired, not
superseded: the hit rate is the share of prompts that a peer helped, of those that needed help to the end. The hit rate
from a source is the share of settled prompts that were settled by its success.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.records.version import Version


@dataclass(frozen=True, slots=True)
class Failure:
    """An own group that failed as a whole: its prompt in own tokens, and the newest version that sampled it."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    version: Version


class PendingRescues:
    """The failures that await a rescue: at most `max_pending`, one per prompt.

    A failure is rescued within `gate_age_versions` steps, or never.
    """

    def __init__(self, *, max_pending: int, gate_age_versions: int) -> None:
        self.max_pending = max_pending
        self.gate_age_versions = gate_age_versions
        self._failures: dict[str, Failure] = {}
        self._forget: dict[str, None] = {}
        self._totals: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._hits_from: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._failures)

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._failures

    @property
    def prompt_ids(self) -> list[str]:
        """The prompts, least recently failed first."""
        return list(self._failures)

    def failed(self, failure: Failure) -> None:
        """Enter a failure. It replaces the failure on the same prompt, unless that one is newer."""
        held = self._failures.get(failure.prompt_id)
        if held is not None and held.version > failure.version:
            return
        self._totals["asked"] += held is None
        self._failures.pop(failure.prompt_id, None)
        self._failures[failure.prompt_id] = failure
        while len(self._failures) > self.max_pending:
            self._drop(next(iter(self._failures)), "expired")

    def succeeded(self, prompt_id: str, version: Version) -> None:
        """Drop the failure on a prompt where an own group of the same or a newer version had a success."""
        held = self._failures.get(prompt_id)
        if held is not None and held.version <= version:
            self._drop(prompt_id, "superseded")

    def hit(self, prompt_id: str, source: str) -> Failure:
        """Settle the failure on a prompt by a success of `source`, and return the failure."""
        self._hits_from[source] += 1
        return self._drop(prompt_id, "hit")

    def expire(self, *, step: int) -> None:
        """Give up every failure that is more than `gate_age_versions` versions older than `step`."""
        old = [f for f in self._failures.values() if step - f.version.step > self.gate_age_versions]
        for failure in old:
            self._drop(failure.prompt_id, "expired")

    def take_forgotten(self) -> list[str]:
        """Return the prompts that have left the table since the last call and have not come back."""
        forgotten = [prompt_id for prompt_id in self._forget if prompt_id not in self._failures]
        self._forget.clear()
        return forgotten

    def take_counts(self) -> dict[str, float]:
        """Return metrics: the events since the last call, the pending prompts, and the cumulative hit rates once
        defined.
        """
        news = self._totals - self._reported
        self._reported = self._totals.copy()
        counts = {f"sharing/{name}_prompts": float(news[name]) for name in ("asked", "hit", "expired")}
        counts |= {"regime/superseded_prompts": float(news["superseded"]), "sharing/pending_prompts": float(len(self))}
        settled = self._totals["hit"] + self._totals["expired"]
        if settled:
            counts["sharing/hit_rate"] = self._totals["hit"] / settled
            counts |= {f"sharing/hit_rate_from/{source}": n / settled for source, n in self._hits_from.items()}
        return counts

    def state(self) -> dict[str, Any]:
        """Return everything as JSON values; failures as rows [prompt id, token ids, run epoch, step]."""
        rows = [
            [f.prompt_id, list(f.prompt_token_ids), f.version.run_epoch, f.version.step]
            for f in self._failures.values()
        ]
        counters = {"totals": self._totals, "reported": self._reported, "hits_from": self._hits_from}
        return {"failures": rows, "forget": list(self._forget)} | {k: dict(v) for k, v in counters.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; failures beyond `max_pending` expire."""
        self._forget = dict.fromkeys(state["forget"])
        self._totals, self._reported = Counter(state["totals"]), Counter(state["reported"])
        self._hits_from = Counter(state["hits_from"])
        self._failures = {
            prompt_id: Failure(prompt_id, tuple(token_ids), Version(run_epoch, step))
            for prompt_id, token_ids, run_epoch, step in state["failures"]
        }
        while len(self._failures) > self.max_pending:
            self._drop(next(iter(self._failures)), "expired")

    def _drop(self, prompt_id: str, outcome: str) -> Failure:
        self._totals[outcome] += 1
        self._forget[prompt_id] = None
        return self._failures.pop(prompt_id)
