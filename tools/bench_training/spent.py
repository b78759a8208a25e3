"""CPU seconds that a run has spent, read from the clocks of all processes of a tree."""

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import psutil


@dataclass(frozen=True)
class Spent:
    """CPU seconds and work of a run, from the first weights to the last update.

    `startup_cpu_s` came before: imports, loading, the first folder.
    """

    samples: int
    """Number of answers that were trained on."""
    tokens: int
    """Number of tokens of these answers."""
    cpu_s: float
    """CPU seconds of all processes."""
    train_cpu_s: float
    """Part of `cpu_s` that went into training."""
    rollout_cpu_s: float
    """Part of `cpu_s` from prompts to scored answers."""
    startup_cpu_s: float

    @property
    def samples_per_cpu_s(self) -> float:
        """Answers per CPU second, from prompt to update."""
        return self.samples / self.cpu_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Answer tokens per CPU second, from prompt to update."""
        return self.tokens / self.cpu_s

    @property
    def trained_tokens_per_cpu_s(self) -> float:
        """Answer tokens per CPU second of the training alone."""
        return self.tokens / self.train_cpu_s

    @property
    def mean_tokens(self) -> float:
        """Mean length of an answer, in tokens."""
        return self.tokens / self.samples

    def __add__(self, other: "Spent") -> "Spent":
        """Sum of two runs side by side."""
        return Spent(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class Clock(NamedTuple):
    """CPU seconds of one process. It has no title when it has ended and nobody has waited for it."""

    title: str
    cpu_s: float
    waited_for_s: float = 0.0
    """CPU seconds of children that ended and that it has waited for, and of their children."""


Clocks = dict[int, Clock]
"""Clocks of processes, by pid."""


def clocks(root_pid: int) -> Clocks:
    """Clocks of a process and of all its descendants."""
    found: Clocks = {}
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(root_pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times, title = process.cpu_times(), ""
                with suppress(psutil.ZombieProcess):  # it has ended, and counts until its parent has waited for it
                    title = " ".join(process.cmdline())
                waited_for_s = times.children_user + times.children_system
                found[process.pid] = Clock(title, times.user + times.system, waited_for_s)
    return found


def total_s(found: Clocks) -> float:
    """CPU seconds of all processes, also of ended ones, which count with the process that waited for them."""
    return sum(clock.cpu_s + clock.waited_for_s for clock in found.values())


def between_s(before: Clocks, after: Clocks, *parts: str) -> float:
    """CPU seconds between two looks, of the processes of `after` whose title contains one of `parts`."""
    mine = {pid: clock for pid, clock in after.items() if any(part in clock.title for part in parts)}
    return sum(clock.cpu_s - before[pid].cpu_s if pid in before else clock.cpu_s for pid, clock in mine.items())
