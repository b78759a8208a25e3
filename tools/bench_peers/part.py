"""Protocols of a system's producer and consumer in the benchmark's processes."""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bench_peers.loads import Checklist
from mrl.records.experience import ExperienceRecord

Settings = dict[str, object]
"""Address of the broker, and whatever else the module of the system needs."""

DEADLINE_S = 60.0
"""Seconds after which a wait of the benchmark fails."""


class Stamp(NamedTuple):
    """A moment of a process, by two clocks."""

    at_s: float
    """Time by the monotonic clock, which all processes of a host share."""
    cpu_s: float
    """CPU seconds of all threads of the process until then."""


def stamp() -> Stamp:
    """Stamp of now."""
    return Stamp(time.monotonic(), time.process_time())


class Producer(Protocol):
    """Encodes records and hands them to the broker. Made in the process that uses it."""

    def prepare(self, records: Sequence[ExperienceRecord]) -> Sequence[object]:
        """Do the work that comes before the clock starts; return items of which `send` takes parts."""

    def send(self, part: Sequence[object], *, is_paced: bool) -> None:
        """Put some of the items. May wait for earlier ones; with `is_paced` there is time to wait for these as well."""

    def finish(self) -> None:
        """Wait until everything is acknowledged. Raises RuntimeError when it is not."""

    def acknowledgements(self) -> list[tuple[int, float]]:
        """Return rising pairs (records sent since the last `prepare` that are acknowledged, time); may be empty."""

    def close(self) -> None:
        """End the connection."""


class Consumer(Protocol):
    """Takes records from the broker and decodes them. Made in the process that uses it."""

    def take_all(self, checklist: Checklist) -> Stamp:
        """Take and commit records until none is missing; return that moment.

        Raises RuntimeError or TimeoutError when it takes too long.
        """

    def close(self) -> None:
        """End the connection."""


PART_RECORDS = {"rollout": 16, "outcome": 512, "both": 32}
"""Number of records that a flooding producer hands over in one call, by kind of load."""
