"""Outcome of a run that is over, by its metrics."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mrl.metrics.jsonl import each_metrics


class Outcome(NamedTuple):
    """Rewards, accuracies and slots of a run."""

    rewards: dict[str, list[tuple[int, float]]]
    """Policy -> pairs (step, mean reward), in order of time."""
    accuracies: dict[str, float]
    """Policy -> accuracy on held-out prompts at the last step that was evaluated."""
    most_held_slots: float
    """Highest number of slots that all workers together could have had in use."""

    @property
    def accuracy(self) -> float:
        """Mean accuracy over policies; 0 without any."""
        return sum(self.accuracies.values()) / len(self.accuracies) if self.accuracies else 0.0


def outcome_of(run_folder: Path) -> Outcome:
    """Read the outcome of a run that is over from its metrics."""
    rewards: dict[str, list[tuple[int, float]]] = {}
    accuracies: dict[str, float] = {}
    held: list[tuple[str, float]] = []
    for line in each_metrics(run_folder / "metrics.jsonl"):
        values: dict[str, Any] = line.get("values", {})
        if "reward/mean" in values:
            rewards.setdefault(line["policy"], []).append((line["step"], values["reward/mean"]))
        if "eval/accuracy" in values:
            accuracies[line["policy"]] = values["eval/accuracy"]
        if "allocation/held_slots" in values:
            held.append((line["policy"], values["allocation/held_slots"]))
    return Outcome(rewards, accuracies, most_together(held))


def most_together(said: Iterable[tuple[str, float]]) -> float:
    """Largest sum over policies of the slots said of them in one round; a round begins where a policy comes again."""
    together: dict[str, float] = {}
    most = 0.0
    for policy, slots in said:
        together = {policy: slots} if policy in together else together | {policy: slots}
        most = max(most, sum(together.values()))
    return most
