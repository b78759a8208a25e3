"""Interface of the supervisor to the live view and the headless lines: takes in telemetry, gives what to show."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mrl.config.schema import RunConfig
from mrl.metrics.names import is_known
from mrl.records.telemetry_messages import MetricsRecord, TelemetryRecord
from mrl.report.console_lines import accuracy_line, heartbeat_line, missed_note, step_line, withheld_note
from mrl.report.live import LiveView, Title
from mrl.report.number_format import fixed, labelled, signed
from mrl.report.palette import colour_of
from mrl.report.progress import ALL_TASKS, MissedPeers, Progress, is_step


class RunDisplay:
    """Takes in telemetry and shows it. `now_s` is from a clock that does not jump, the same clock in every call."""

    def __init__(self, config: RunConfig) -> None:
        self.progress = Progress(list(config.policies), steps=config.run.steps)
        self._tasks = list(config.tasks)
        self._title = Title(config.run.name, str(config.sharing.get("regime", "independent")))
        self._peers = MissedPeers()
        self._due: list[str] = []

    def apply(self, record: TelemetryRecord, now_s: float) -> None:
        """Take in one record that arrived at `now_s`."""
        self.progress.apply(record, now_s)
        if isinstance(record, MetricsRecord) and is_step(record.role, record.values):
            missed = self._peers.take(record.policy, record.step, record.values)
            self._due += [missed_note(one, self._title.regime) for one in missed]

    def take_due(self) -> list[str]:
        """Return the notes on pairs of policies that have begun to miss each other since the last call, each once."""
        due, self._due = self._due, []
        return due

    def replay(self, lines: Iterable[dict[str, Any]], now_s: float) -> None:
        """Take in the lines of metrics of an earlier attempt, from `each_metrics`, before a resumed run goes on."""
        for line in lines:
            if isinstance(line.get("values"), dict):
                values = {name: float(value) for name, value in line["values"].items() if is_known(name)}
                record = MetricsRecord(
                    role=line["role"],
                    policy=line["policy"],
                    step=line["step"],
                    time_unix_s=line["time_unix_s"],
                    values=values,
                )
                self.progress.apply(record, now_s)

    def note(self, text: str, now_s: float) -> None:
        """Show an event, for example that a role was restarted and why."""
        self.progress.note(text, now_s)

    def render(self, now_s: float | None = None) -> RenderableType:
        """Return the live view at `now_s`, by default at the newest time seen."""
        if now_s is not None:
            self.progress.see(now_s)
        return LiveView(self.progress, self._title, self.progress.now_s)

    def render_ended(self) -> RenderableType:
        """Return the live view after all processes have ended: without roles, shares of capacity and episode."""
        return LiveView(self.progress, self._title, self.progress.now_s, has_ended=True)

    def step_line(self, record: TelemetryRecord) -> str | None:
        """Return the headless line of one learner step or one evaluation; None for every other record."""
        if not isinstance(record, MetricsRecord):
            return None
        return step_line(record, self.progress.steps) or accuracy_line(record)

    def heartbeat_line(self, now_s: float) -> str:
        """Return the headless line about the whole pipeline."""
        return heartbeat_line(self.progress, now_s)

    def final_notes(self) -> list[str]:
        """Return notes on losses to learning and their cures: successes kept from peers, pairs that miss each other."""
        notes = [withheld_note(name, sum(one.withheld.values())) for name, one in self.progress.policies.items()]
        notes += [missed_note(one, self._title.regime) for one in self._peers.now]
        return [note for note in notes if note]

    def final_table(self) -> RenderableType:
        """Return the table of held-out accuracy at start and end, and of the gain, per policy and task."""
        table = Table(box=box.SIMPLE_HEAD, title="held-out accuracy", title_justify="left", show_edge=False)
        table.add_column("policy")
        table.add_column("task")
        for heading in ("start", "end", "gain"):
            table.add_column(heading, justify="right")
        for index, (name, policy) in enumerate(self.progress.policies.items()):
            known = [task for task in policy.accuracy if task not in {ALL_TASKS, *self._tasks}]
            for task in (ALL_TASKS, *self._tasks, *known):
                start, end = policy.start_and_end(task)
                overall = task == ALL_TASKS
                if not overall and start is None:
                    continue
                gain = None if start is None or end is None else end - start
                shown = labelled(fixed(end), policy.end_step(task), self.progress.steps)
                table.add_row(
                    Text(name if overall else "", f"bold {colour_of(index).dark}"),
                    "all" if overall else task,
                    *(Text(text, "bold" if overall else "") for text in (fixed(start), shown, signed(gain))),
                    end_section=task == (*self._tasks, *known)[-1] if policy.accuracy else True,
                )
        return table
