"""What the module of a system has to offer to the processes of the benchmark."""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bench_peers.loads import Checklist
from mrl.records.experience import ExperienceRecord

Settings = dict[str, object]
"""How to reach the broker, and what else the module wants to know."""

DEADLINE_S = 60.0
"""Nothing in the benchmark takes longer."""


class Stamp(NamedTuple):
    """A moment of a process."""

    at_s: float
    """By the monotonic clock, which all processes of a host share."""
    cpu_s: float
    """What all threads of the process have taken by then."""


def stamp() -> Stamp:
    """Now."""
    return Stamp(time.monotonic(), time.process_time())


class Producer(Protocol):
    """Hands records to the broker, encoded by it. Made in the process that uses it."""

    def prepare(self, records: Sequence[ExperienceRecord]) -> Sequence[object]:
        """What is done before the clock starts; returns what `send` takes parts of."""

    def send(self, part: Sequence[object], *, is_paced: bool) -> None:
        """Put these. May wait for earlier ones; with `is_paced` there is time to wait for these as well."""

    def finish(self) -> None:
        """Wait until everything is acknowledged. Raises RuntimeError when it is not."""

    def acknowledgements(self) -> list[tuple[int, float]]:
        """(how many of the records sent since the last call are acknowledged, since when), rising; may be empty."""

    def close(self) -> None:
        """End the connection."""


class Consumer(Protocol):
    """Takes records from the broker and decodes them. Made in the process that uses it."""

    def take_all(self, checklist: Checklist) -> Stamp:
        """Take and commit until nothing is missing; returns when that was.

        Raises RuntimeError or TimeoutError when it takes too long.
        """

    def close(self) -> None:
        """End the connection."""


PART_RECORDS = {"rollout": 16, "outcome": 512, "both": 32}
"""How many records a flooding producer hands over in one call."""
