"""Weights & Biases: online, or offline (`WANDB_MODE=offline`) in a folder that `wandb sync` sends later."""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from mrl.metrics.trackers.sample_table import COLUMNS, SampleTable
from mrl.metrics.trackers.tracker import WHOLE_RUN, Points, StartedRun, TrackedRun

STEP = "step"
"""Last segment of the series of a policy's steps, over which its other series are drawn."""


class WandbTracker:
    """One run of a project, which wandb finds again by its id."""

    package: ClassVar[str] = "wandb"
    options: ClassVar[Mapping[str, type]] = {
        "entity": str,
        "group": str,
        "job_type": str,
        "tags": list,
        "notes": str,
        "mode": str,
    }

    @staticmethod
    def missing_login(environment: Mapping[str, str], options: Mapping[str, Any]) -> str:
        """See Tracker. An online run needs a key: in the environment, or where `wandb login` keeps it."""
        mode = options.get("mode") or environment.get("WANDB_MODE") or "online"
        if mode != "online" or environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
            return ""
        host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
        try:
            found = netrc.netrc(environment.get("NETRC") or Path.home() / ".netrc").authenticators(host)
        except (OSError, netrc.NetrcParseError):
            found = None
        return "" if found else 'run `wandb login`, or set WANDB_MODE=offline or options.mode = "offline"'

    def start(self, run: TrackedRun) -> StartedRun:
        """Begin a run, or continue the run of this id."""
        import wandb

        if run.folder:
            os.makedirs(run.folder, exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id or None,
            resume="allow" if run.run_id else None,
            dir=run.folder or None,
            config=run.config,
            settings=wandb.Settings(console="off"),
            **run.options,
        )
        for owner in (*run.config.get("policies", {}), WHOLE_RUN):
            self._run.define_metric(f"{owner}/{STEP}", hidden=True)
            self._run.define_metric(f"{owner}/*", step_metric=f"{owner}/{STEP}")
        where = self._run.url or f"wandb sync {Path(self._run.dir).parent}"
        return StartedRun(str(self._run.id), where)

    def log(self, points: Points) -> None:
        """Log a row, whose series are drawn over the step of their own policy."""
        self._run.log({f"{points.owner}/{STEP}": points.step, "time_unix_s": points.time_unix_s, **points.finite})

    def table(self, samples: SampleTable) -> None:
        """Log a table of this step, drawn over the step of its policy."""
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in samples.rows])
        self._run.log({f"{samples.policy}/{STEP}": samples.step, samples.name: table})

    def finish(self) -> None:
        """Wait until everything is sent, or written to the file."""
        self._run.finish()
