"""What a tracker is given and what it does; the messages between the supervisor and a tracker's process."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from mrl.metrics.trackers.sample_table import SampleFile, SampleTable
from mrl.records.telemetry_messages import MetricsRecord

WHOLE_RUN = "run"
"""Begins the series of what belongs to no single policy."""


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a tracker is told at its start."""

    kind: str
    project: str
    name: str
    run_id: str = ""
    """What the tracker called this run in an earlier attempt; empty for one that is new to it."""
    folder: str = ""
    """Where it keeps its files; empty for where it does so by itself."""
    options: dict[str, Any] = {}
    config: dict[str, Any] = {}
    """The resolved configuration of the run, without the user's keys."""


class StartedRun(msgspec.Struct, frozen=True):
    """What a tracker says of a run that it has begun or goes on with."""

    run_id: str
    where: str
    """Where to look at it: a command or an address."""


class Points(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Values of one moment, one of each series; None for a value that was no finite number."""

    owner: str
    """The policy, or `WHOLE_RUN`; every series begins with it."""
    step: int
    time_unix_s: float
    values: dict[str, float | None]

    @property
    def finite(self) -> dict[str, float]:
        """The values that can be drawn."""
        return {series: value for series, value in self.values.items() if value is not None and math.isfinite(value)}


Given = Points | SampleFile
"""What goes to a tracker's process."""


def num_points(given: Given) -> int:
    """How much it counts when it is taken or lost: each value is a point, and so is a table of samples."""
    return len(given.values) if isinstance(given, Points) else 1


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a tracker's process, for each line that it was given: what became of it."""

    started: StartedRun | None = None
    num_taken: int = 0
    num_failed: int = 0
    failure: str = ""
    """Why points were not taken, or why it did not start or finish."""


class Tracker(Protocol):
    """One tracker, in a process of its own. It may raise anything, take any time, and never return."""

    package: ClassVar[str]
    """The module that it needs; the extra of mrl that brings it is called like the tracker."""
    options: ClassVar[Mapping[str, type]]
    """Keys of its table `options`, with the type of each."""

    @staticmethod
    def missing_login(environment: Mapping[str, str], options: Mapping[str, Any]) -> str:
        """How to log in, where nobody is logged in and it cannot do without; else empty."""

    def start(self, run: TrackedRun) -> StartedRun:
        """Begin a run, or go on with the one of this id."""

    def log(self, points: Points) -> None:
        """Take in points; steps of one owner mostly rise, and begin again where a resumed run goes on."""

    def table(self, samples: SampleTable) -> None:
        """Show answers of one step of one policy."""

    def finish(self) -> None:
        """Write or send what is left."""


def points_of(record: MetricsRecord) -> Points:
    """Series of one record: POLICY/metric, of a worker POLICY/worker_N/metric, of the whole run run/metric."""
    owner = record.policy or WHOLE_RUN
    kind, _, rest = record.role.partition("/")
    unit = rest.partition("/")[2].replace("/", ":")
    prefix = f"{owner}/worker_{unit}" if kind == "worker" and unit else owner
    values = {f"{prefix}/{name}": value for name, value in record.values.items()}
    return Points(owner=owner, step=record.step, time_unix_s=record.time_unix_s, values=dict(values))
