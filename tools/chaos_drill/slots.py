"""Slots that workers had in use by their own logs, independent of the allocator's account."""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """Line of a worker's log: from this time on it may have up to `at_most` slots in use."""

    unix_s: float
    worker: str
    at_most: int


End = tuple[float, float]
"""Unix times between which a process ended, or was stopped for good."""


def most_in_use(run_folder: Path, ends: Mapping[str, Iterable[End]]) -> int:
    """Highest number of slots that all workers of a run together may have had in use; 0 if no log says any.

    `ends`: worker -> ends of its processes. A process that logged a line between those times ended right after it.
    """
    uses = [use for log in (run_folder / "logs").glob("attempt_*/worker*.log") for use in said_in(log)]
    uses += [Use(last_word(uses, worker, end), worker, 0) for worker, own in ends.items() for end in own]
    now: dict[str, int] = {}
    most = 0
    for use in sorted(uses, key=lambda use: use.unix_s):
        now[use.worker] = use.at_most
        most = max(most, sum(now.values()))
    return most


def last_word(uses: Iterable[Use], worker: str, end: End) -> float:
    """Unix time at which a process that ended between these times last logged a line, or was last seen."""
    begin_s, end_s = end
    return max([begin_s, *(use.unix_s for use in uses if use.worker == worker and begin_s < use.unix_s < end_s)])


def said_in(log: Path) -> Iterator[Use]:
    """Slots that one worker's log says it has; lines that were torn by a kill are passed over."""
    for line in log.read_bytes().splitlines():
        if b'"event": "slots changed"' not in line:
            continue
        try:
            said = json.loads(line)
            yield Use(datetime.fromisoformat(said["timestamp"]).timestamp(), said["role"], said["at_most"])
        except (ValueError, KeyError):
            continue
