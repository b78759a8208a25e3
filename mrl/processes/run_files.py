"""The files that hold a run's telemetry: metrics.jsonl, samples, the timeline. One process writes them."""

from mrl.config.run_folder import RunFolder
from mrl.metrics.jsonl import MetricsWriter, SampleWriter
from mrl.metrics.timeline import TimelineWriter
from mrl.metrics.unconfirmed_metrics import UnconfirmedMetricsReader
from mrl.records.telemetry_messages import (
    HeartbeatRecord,
    MetricsRecord,
    SampleRecord,
    SpansRecord,
    TelemetryRecord,
)


class RunFiles:
    """Writers of a run's telemetry; each record goes to the file of its kind."""

    def __init__(self, folder: RunFolder) -> None:
        self._metrics = MetricsWriter(folder.metrics_jsonl)
        self._samples = SampleWriter(folder.rollouts)
        self._timeline = TimelineWriter(folder.timeline_jsonl)
        self.left = UnconfirmedMetricsReader(folder.unheard, folder.metrics_jsonl)

    def write(self, record: TelemetryRecord) -> None:
        """Write one record. Raises RecordError when it names a place outside its folder, OSError on a full disk."""
        match record:
            case SampleRecord():
                self._samples.write(record)
            case SpansRecord():
                self._timeline.write(record)
            case HeartbeatRecord() | MetricsRecord():
                self._metrics.write(record)

    def close(self) -> None:
        """Write out what is buffered. Raises OSError, also for what could not be written before."""
        self._metrics.close()
