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


def most_in_use(run_folder: Path, ends: Mapping[str, Iterable[float]]) -> int:
    """The most that all workers of a run together may have had in use at one moment.

    `ends`: worker -> the times at which a process of it was gone, or was stopped for good; 0 without any worker's word.
    """
    uses = [use for log in (run_folder / "logs").glob("attempt_*/worker*.log") for use in said_in(log)]
    uses += [Use(unix_s, worker, 0) for worker, times in ends.items() for unix_s in times]
    now: dict[str, int] = {}
    most = 0
    for use in sorted(uses, key=lambda use: (use.unix_s, use.at_most)):
        now[use.worker] = use.at_most
        most = max(most, sum(now.values()))
    return most


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
