"""trackio: a local SQLite database with a dashboard (`trackio show`), or a Hugging Face Space."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from mrl.metrics.trackers.sample_table import COLUMNS, SampleTable
from mrl.metrics.trackers.tracker import Points, StartedRun, TrackedRun


class TrackioTracker:
    """One run of a project, which trackio finds again by its name."""

    package: ClassVar[str] = "trackio"
    options: ClassVar[Mapping[str, type]] = {"space_id": str, "private": bool, "group": str}

    @staticmethod
    def missing_login(environment: Mapping[str, str], options: Mapping[str, Any]) -> str:
        """See Tracker. A Space needs a Hugging Face token; the local database needs no login."""
        if not (options.get("space_id") or environment.get("TRACKIO_SPACE_ID")):
            return ""
        from huggingface_hub import get_token

        login = "run `hf auth login`, or leave options.space_id out: the local database needs no login"
        return "" if get_token() else login

    def start(self, run: TrackedRun) -> StartedRun:
        """Begin a run of this name, or continue the newest run of this name."""
        if run.folder:
            os.environ["TRACKIO_DIR"] = run.folder  # read when trackio is imported
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=run.run_id or run.name,
            config=run.config,
            resume="allow" if run.run_id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **run.options,
        )
        where = f"trackio show --project {run.project}"
        return StartedRun(str(self._run.name), f"TRACKIO_DIR={run.folder} {where}" if run.folder else where)

    def log(self, points: Points) -> None:
        """Log a row, dated by its arrival here."""
        self._run.log(points.finite, step=points.step)

    def table(self, samples: SampleTable) -> None:
        """Log a row with a table in it; trackio shows its texts as Markdown."""
        import trackio

        table = trackio.Table(columns=list(COLUMNS), data=[list(row) for row in samples.rows])
        self._run.log({samples.name: table}, step=samples.step)

    def finish(self) -> None:
        """Wait until the rows are in the database, or sent."""
        self._run.finish()
