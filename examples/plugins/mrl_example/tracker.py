"""`csv`: all metrics of a run as one file of comma-separated values."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mrl.metrics.trackers.tracker import Points, StartedRun, TrackedRun


class CsvTracker:
    """Runs in a process of its own: whatever it does wrong costs points, and never the run."""

    package: ClassVar[str] = "csv"
    options: ClassVar[Mapping[str, type]] = {}

    @staticmethod
    def missing_login(environment: Mapping[str, str], options: Mapping[str, Any]) -> str:
        """It knows no login."""
        return ""

    def start(self, run: TrackedRun) -> StartedRun:
        """Append to the run's file, under a name that a resumed run finds again."""
        run_id = run.run_id or run.name
        Path(run.folder).mkdir(parents=True, exist_ok=True)
        path = Path(run.folder) / f"{run_id}.csv"
        self._file = path.open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file)
        if not run.run_id:
            self._rows.writerow(["time_unix_s", "step", "series", "value"])
        return StartedRun(run_id, str(path))

    def log(self, points: Points) -> None:
        """One row for each value that is a finite number."""
        self._rows.writerows([points.time_unix_s, points.step, *one] for one in points.finite.items())

    def finish(self) -> None:
        """Write what is buffered."""
        self._file.close()
