"""SwanLab: online, or offline (`SWANLAB_MODE=offline`) in a folder that `swanlab sync` sends later."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mrl.metrics.trackers.sample_table import COLUMNS, SampleTable
from mrl.metrics.trackers.tracker import Points, StartedRun, TrackedRun


class SwanlabTracker:
    """One run of a project, which SwanLab finds again by its id."""

    package: ClassVar[str] = "swanlab"
    options: ClassVar[Mapping[str, type]] = {
        "workspace": str,
        "group": str,
        "job_type": str,
        "tags": list,
        "description": str,
        "public": bool,
        "mode": str,
    }

    @staticmethod
    def missing_login(environment: Mapping[str, str], options: Mapping[str, Any]) -> str:
        """See Tracker. An online run needs a key: in the environment, or where `swanlab login` keeps it."""
        mode = options.get("mode") or environment.get("SWANLAB_MODE") or "online"
        if mode not in ("online", "cloud") or environment.get("SWANLAB_API_KEY"):
            return ""
        root = environment.get("SWANLAB_ROOT") or environment.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab"
        if any((Path(folder) / ".netrc").is_file() for folder in (Path.cwd() / ".swanlab", root)):
            return ""
        return 'run `swanlab login`, or set SWANLAB_MODE=offline or options.mode = "offline"'

    def start(self, run: TrackedRun) -> StartedRun:
        """Begin a run, or continue the run of this id.

        SwanLab collects nothing about the host and asks no questions: the process has no terminal.
        """
        import swanlab

        os.makedirs(run.folder, exist_ok=True)
        nothing = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
        settings = swanlab.Settings(
            interactive=False,
            probe=swanlab.Settings.Probe(**nothing),
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
        )
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.run_id or None,
            resume="allow" if run.run_id else "never",
            log_dir=run.folder,
            config=run.config,
            settings=settings,
            **run.options,
        )
        places = {"online": lambda: str(self._run.url), "local": lambda: f"swanlab watch {run.folder}"}
        where = places.get(self._run.mode, lambda: f"swanlab sync {self._run.dir}")
        return StartedRun(str(self._run.id), where())

    def log(self, points: Points) -> None:
        """Log a row at its policy's step. Of several points of a series at one step, SwanLab keeps the first online."""
        self._run.log(points.finite, step=points.step)

    def table(self, samples: SampleTable) -> None:
        """Log a text for each answer, with its reward and rescuer as the caption."""
        import swanlab

        texts = []
        for _, _, prompt, answer, reward, rescued_by in samples.rows:
            caption = f"{COLUMNS[4]} {reward}" + f", {COLUMNS[5]} {rescued_by}" * bool(rescued_by)
            texts.append(swanlab.Text(f"{COLUMNS[2]}: {prompt}\n\n{COLUMNS[3]}: {answer}", caption=caption))
        self._run.log({samples.name: texts}, step=samples.step)

    def finish(self) -> None:
        """Wait until everything is sent, or written to the file."""
        self._run.finish()
