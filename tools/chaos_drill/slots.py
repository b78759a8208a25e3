"""Slots that workers had in use by their own logs, whatever the allocator thought of it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """From this time on a worker may have so many slots in use."""

    unix_s: float
    worker: str
    at_most: int


End = tuple[float, float]
"""Times between which a process ended, or was stopped for good."""


def most_in_use(run_folder: Path, ends: Mapping[str, Iterable[End]]) -> int:
    """The most that all workers of a run together may have had in use at one moment; 0 without any worker's word.

    `ends`: of each worker's processes. One that still said something between those times ended right after that.
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
    """When a process that ended between these times said something last, or was seen last."""
    begin_s, end_s = end
    return max([begin_s, *(use.unix_s for use in uses if use.worker == worker and begin_s < use.unix_s < end_s)])


def said_in(log: Path) -> Iterator[Use]:
    """What one worker's log says; lines that were torn by a kill are passed over."""
    for line in log.read_bytes().splitlines():
        if b'"event": "slots"' not in line:
            continue
        try:
            said = json.loads(line)
            yield Use(datetime.fromisoformat(said["timestamp"]).timestamp(), said["role"], said["at_most"])
        except (ValueError, KeyError):
            continue
