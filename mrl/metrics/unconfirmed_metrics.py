"""Metrics that a role sent without confirmation: a role that ends leaves them in a file, which the supervisor reads.

The supervisor sends every heartbeat back. A link keeps the order, so metrics sent before that heartbeat have arrived.
The file may also hold metrics that did arrive, unknown to the role; the supervisor leaves out rows that it has.
"""

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from mrl.errors import RecordError
from mrl.files import replace_file
from mrl.metrics.jsonl import read_tail
from mrl.records.codec import decode, decoder, encode
from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord, TelemetryRecord

MAX_KEPT_BYTES = 4 * 1024 * 1024
"""Bytes of unconfirmed records that one role keeps; beyond them the oldest are given up."""
TAIL_BYTES = 16 * 1024 * 1024
"""Bytes at the end of `metrics.jsonl` in which all metrics lie that have arrived unknown to their role."""
SUFFIX = ".msgpack"

Key = tuple[str, str, int, float, tuple[str, ...]]

log = structlog.get_logger()


class UnconfirmedMetricsFile(msgspec.Struct, frozen=True):
    """Content of a file of unconfirmed metrics."""

    records: list[MetricsRecord]


_left_decoder: msgspec.msgpack.Decoder[UnconfirmedMetricsFile] = decoder(UnconfirmedMetricsFile)


class UnconfirmedMetrics:
    """Keeps unconfirmed metrics, between a role's telemetry and its link. Safe from any thread; only `settle` waits."""

    def __init__(self, post: Callable[[bytes], bool], *, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._post, self._max_bytes = post, max_bytes
        self._changed = threading.Condition()
        self._kept: deque[tuple[bytes, MetricsRecord | None]] = deque()
        self._num_bytes = self._num_metrics = 0

    def say(self, record: TelemetryRecord) -> bool:
        """Post a record to the link; metrics and heartbeats are kept until a heartbeat comes back that is no older."""
        body = encode(record)
        with self._changed:  # records are kept in the order in which they leave
            if isinstance(record, MetricsRecord | HeartbeatRecord):
                self._kept.append((body, record if isinstance(record, MetricsRecord) else None))
                self._num_bytes += len(body)
                self._num_metrics += isinstance(record, MetricsRecord)
                while self._num_bytes > self._max_bytes:
                    self._forget_first()
            return self._post(body)

    def came_back(self, body: bytes) -> None:
        """Drop records up to this heartbeat, which the supervisor has sent back."""
        with self._changed:
            if any(kept == body for kept, _ in self._kept):
                while self._forget_first() != body:
                    pass
            self._changed.notify_all()

    def settle(self, beat: HeartbeatRecord, path: Path, timeout_s: float) -> None:
        """Post a last heartbeat; metrics that are not confirmed within `timeout_s` are left in the file at `path`."""
        if not self._num_metrics:
            return
        self.say(beat)
        with self._changed:
            if self._changed.wait_for(lambda: not self._num_metrics, timeout_s):
                return
            left = UnconfirmedMetricsFile([record for _, record in self._kept if record is not None])
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(path, encode(left), mode=0o600)
        except OSError as error:  # no failure of the role, which has done its work
            log.warning("metrics lost", records=len(left.records), reason=error.strerror)

    def _forget_first(self) -> bytes:
        body, record = self._kept.popleft()
        self._num_bytes -= len(body)
        self._num_metrics -= record is not None
        return body


class UnconfirmedMetricsReader:
    """Supervisor's reader of the files that ended roles have left; every row is taken once."""

    def __init__(self, folder: Path, metrics_jsonl: Path) -> None:
        self._folder, self._metrics_jsonl = folder, metrics_jsonl
        self._read: set[Key] = set()

    def take(self, write: Callable[[MetricsRecord], object]) -> None:
        """Give `write` every row of the files that `metrics.jsonl` lacks, and remove the files. Raises OSError."""
        paths = sorted(self._folder.glob(f"*{SUFFIX}"))
        written = {_key(line) for line in read_tail(self._metrics_jsonl, TAIL_BYTES)} if paths else set()
        for path in paths:
            for record in _records_in(path):
                if _key_of(record) not in written:
                    write(record)
                self._read.add(_key_of(record))
            path.unlink()

    def had(self, record: MetricsRecord) -> bool:
        """Whether a record that comes over the link was read from a file before."""
        return bool(self._read) and _key_of(record) in self._read


def _records_in(path: Path) -> list[MetricsRecord]:
    try:
        return decode(path.read_bytes(), _left_decoder).records
    except RecordError as error:
        log.warning("file of unsent metrics is damaged and ignored", file=str(path), reason=str(error))
        return []


def _key_of(record: MetricsRecord) -> Key:
    return record.role, record.policy, record.step, record.time_unix_s, tuple(sorted(record.values))


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    parts = (line.get(name) for name in ("role", "policy", "step", "time_unix_s"))
    return (*parts, tuple(sorted(line.get("values") or ())))
