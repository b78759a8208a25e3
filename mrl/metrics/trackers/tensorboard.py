"""TensorBoard: event files in a folder, written with TensorBoard's own package; torch is not needed for it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from mrl.metrics.trackers.sample_table import COLUMNS, SampleTable
from mrl.metrics.trackers.tracker import Points, StartedRun, TrackedRun

_MARKUP = re.compile(r"[\\`*_{}\[\]()#+!~|<>&]")
"""Characters that a cell would show as Markdown or HTML."""


class TensorboardTracker:
    """One folder of event files; every attempt of a run adds a file to it."""

    package: ClassVar[str] = "tensorboard"
    options: ClassVar[Mapping[str, type]] = {}

    @staticmethod
    def missing_login(environment: Mapping[str, str], options: Mapping[str, Any]) -> str:
        """See Tracker. TensorBoard has no login."""
        return ""

    def start(self, run: TrackedRun) -> StartedRun:
        """Open a new event file; the first file of a run has the configuration in it, as a text."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        run_id = run.run_id or run.name
        folder = Path(run.folder) / run_id
        self._writer = EventFileWriter(str(folder))
        if not run.run_id:
            self._write_config(run.config)
        return StartedRun(run_id, f"tensorboard --logdir {run.folder}")

    def log(self, points: Points) -> None:
        """Write one event with a scalar for each series, dated by the time of measurement."""
        values = [self._summary.Value(tag=series, simple_value=value) for series, value in points.finite.items()]
        event = self._event(step=points.step, wall_time=points.time_unix_s, summary=self._summary(value=values))
        self._writer.add_event(event)

    def table(self, samples: SampleTable) -> None:
        """Write a text in Markdown, which TensorBoard shows as a table. Markup in the answers is escaped."""
        rows = [COLUMNS, ["---"] * len(COLUMNS), *([_cell(value) for value in row] for row in samples.rows)]
        text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        self._write_text(samples.name, text, step=samples.step, time_unix_s=samples.time_unix_s)

    def finish(self) -> None:
        """Write the buffered events and close the file."""
        self._writer.close()

    def _write_config(self, config: Mapping[str, Any]) -> None:
        text = msgspec.json.format(msgspec.json.encode(config), indent=2).decode()
        shown = "\n".join(f"    {line}" for line in text.splitlines())  # code, in TensorBoard's Markdown
        self._write_text("config", shown, step=0, time_unix_s=None)

    def _write_text(self, name: str, text: str, *, step: int, time_unix_s: float | None) -> None:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = create_summary_metadata(display_name=name, description="")
        value = self._summary.Value(tag=name, metadata=metadata, tensor=tensor)
        event = self._event(step=step, wall_time=time_unix_s, summary=self._summary(value=[value]))
        self._writer.add_event(event)


def _cell(value: object) -> str:
    """Return a value for one cell of a Markdown table: line ends become `<br>`, and markup is escaped."""
    text = "" if value is None else str(value)
    return "<br>".join(_MARKUP.sub(lambda found: f"&#{ord(found[0])};", line) for line in text.splitlines())
