"""What a run has spent, and the clocks that say it: CPU seconds of all processes of a tree."""

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import psutil


@dataclass(frozen=True)
class Spent:
    """From the first weights to the last update. Startup is what came before: imports, loading, the first folder."""

    samples: int
    """Answers that were trained on."""
    tokens: int
    """Their tokens."""
    cpu_s: float
    """Of all processes."""
    train_cpu_s: float
    """Part of it that went into training."""
    rollout_cpu_s: float
    """Part of it from prompts to scored answers."""
    startup_cpu_s: float

    @property
    def samples_per_cpu_s(self) -> float:
        """From prompt to update."""
        return self.samples / self.cpu_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """The same in answer tokens."""
        return self.tokens / self.cpu_s

    @property
    def trained_tokens_per_cpu_s(self) -> float:
        """Answer tokens per CPU second of the training alone."""
        return self.tokens / self.train_cpu_s

    @property
    def mean_tokens(self) -> float:
        """Length of an answer."""
        return self.tokens / self.samples

    def __add__(self, other: "Spent") -> "Spent":
        """Of two runs side by side."""
        return Spent(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class Clock(NamedTuple):
    """A process and what it has taken; without a title when it has ended and nobody has waited for it."""

    title: str
    cpu_s: float
    waited_for_s: float = 0.0
    """Of children that ended and that it has waited for, theirs included."""


Clocks = dict[int, Clock]
"""By pid."""


def clocks(root_pid: int) -> Clocks:
    """Of a process and everything below it."""
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
    """CPU seconds of all, those included that have ended: they count with who waited for them."""
    return sum(clock.cpu_s + clock.waited_for_s for clock in found.values())


def between_s(before: Clocks, after: Clocks, *parts: str) -> float:
    """CPU seconds between two looks of the processes that `after` has under a title with one of these parts."""
    mine = {pid: clock for pid, clock in after.items() if any(part in clock.title for part in parts)}
    return sum(clock.cpu_s - before[pid].cpu_s if pid in before else clock.cpu_s for pid, clock in mine.items())
