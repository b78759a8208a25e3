"""Protocol of a tracker, and the messages between the supervisor and a tracker's process."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from mrl.metrics.trackers.sample_table import SampleFile, SampleTable
from mrl.records.telemetry_messages import MetricsRecord

WHOLE_RUN = "run"
"""First segment of series that belong to no single policy."""


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Message that starts a tracker: its kind, its options and the run."""

    kind: str
    project: str
    name: str
    run_id: str = ""
    """Id that the tracker gave this run in an earlier attempt; empty for a run that is new to the tracker."""
    folder: str = ""
    """Folder for the tracker's files; empty for the place that its package chooses."""
    options: dict[str, Any] = {}
    config: dict[str, Any] = {}
    """The resolved configuration of the run, without the user's keys."""


class StartedRun(msgspec.Struct, frozen=True):
    """Answer of a tracker that has begun or continues a run."""

    run_id: str
    where: str
    """Where to look at the run: a command or an address."""


class Points(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Values of one moment, one for each series; None for a value that was no finite number."""

    owner: str
    """Policy, or `WHOLE_RUN`: the first segment of every series here."""
    step: int
    time_unix_s: float
    values: dict[str, float | None]

    @property
    def finite(self) -> dict[str, float]:
        """Values that are finite, and so can be drawn."""
        return {series: value for series, value in self.values.items() if value is not None and math.isfinite(value)}


Given = Points | SampleFile
"""Messages to a tracker's process, after the first."""


def num_points(given: Given) -> int:
    """Return the points that a message counts as, taken or lost: one for each value, one for a table of samples."""
    return len(given.values) if isinstance(given, Points) else 1


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a tracker's process, for each line that the process was given: what became of that line."""

    started: StartedRun | None = None
    num_taken: int = 0
    num_failed: int = 0
    failure: str = ""
    """Why points were not taken, or why the tracker did not start or finish."""


class Tracker(Protocol):
    """One tracker, in a process of its own. Its methods may raise anything, take any time, and never return."""

    package: ClassVar[str]
    """Module that the tracker needs; the extra of mrl that installs it has the name of the tracker's kind."""
    options: ClassVar[Mapping[str, type]]
    """Keys of the tracker's table `options`, with the type of each."""

    @staticmethod
    def missing_login(environment: Mapping[str, str], options: Mapping[str, Any]) -> str:
        """Return how to log in, where the tracker needs a login and has none; else empty text."""

    def start(self, run: TrackedRun) -> StartedRun:
        """Begin a run, or continue the run of this id."""

    def log(self, points: Points) -> None:
        """Take in points. Steps of one owner mostly rise, and go back where a run is resumed."""

    def table(self, samples: SampleTable) -> None:
        """Show answers of one step of one policy."""

    def finish(self) -> None:
        """Write or send everything that is buffered."""


def points_of(record: MetricsRecord) -> Points:
    """Return a record's points. Series: POLICY/metric, POLICY/worker_N/metric for a worker, run/metric for the run."""
    owner = record.policy or WHOLE_RUN
    kind, _, rest = record.role.partition("/")
    unit = rest.partition("/")[2].replace("/", ":")
    prefix = f"{owner}/worker_{unit}" if kind == "worker" and unit else owner
    values = {f"{prefix}/{name}": value for name, value in record.values.items()}
    return Points(owner=owner, step=record.step, time_unix_s=record.time_unix_s, values=dict(values))
