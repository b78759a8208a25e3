"""What a role says about itself: metrics, samples, and what it does or waits for.

A role makes one `Telemetry` and gives it a sink, usually a bounded queue to the supervisor. Nothing here blocks.
Heartbeats are built by `beat`, which another thread may call while the role itself is stuck in a wait.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from mrl.metrics.names import is_known
from mrl.records.telemetry import (
    HeartbeatRecord,
    MetricsRecord,
    ResidualsRecord,
    RowResidual,
    SampleRecord,
    TelemetryRecord,
)

MAX_LABEL_CHARS = 200
MAX_SAMPLE_CHARS = 20_000
ROWS_PER_RECORD = 500


class _Wait(NamedTuple):
    what: str
    whom: str
    bound_s: float
    since_s: float


class Telemetry:
    """The voice of one role.

    `role` names the process, unique in the run, its kind first: "learner/qwen", "worker/qwen/0", "exchange".
    `clock` gives unix seconds and only dates records; durations come from `monotonic`.
    `pid` 0 stands for this process.
    """

    def __init__(
        self,
        role: str,
        policy: str,
        sink: Callable[[TelemetryRecord], object],
        clock: Callable[[], float] = time.time,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        pid: int = 0,
    ) -> None:
        self.role, self.policy, self.pid = role, policy, pid or os.getpid()
        self._sink, self._clock, self._monotonic = sink, clock, monotonic
        self._lock = threading.Lock()
        self._doing = ("starting", monotonic())
        self._waits: tuple[_Wait, ...] = ()

    def metrics(self, step: int, values: Mapping[str, float], *, policy: str | None = None) -> None:
        """Emit values measured at `step`; `policy` is for roles that serve several.

        A name outside the table is a mistake in the code and fails an assertion.
        """
        unknown = [name for name in values if not is_known(name)]
        assert not unknown, f"metrics that mrl.metrics.names does not list: {unknown}"
        self._sink(
            MetricsRecord(
                role=self.role,
                policy=self.policy if policy is None else policy,
                step=step,
                time_unix_s=self._clock(),
                values={name: float(value) for name, value in values.items()},
            )
        )

    def sample(
        self,
        step: int,
        *,
        kind: str,
        task: str,
        prompt: str,
        completion: str,
        reward: float,
        source: str = "",
        policy: str | None = None,
    ) -> None:
        """Emit one answer for people to read; kind is "rollout", "rescue" or "evaluation". Long texts are cut."""
        self._sink(
            SampleRecord(
                policy=self.policy if policy is None else policy,
                step=step,
                kind=kind,
                task=task,
                prompt=prompt[:MAX_SAMPLE_CHARS],
                completion=completion[:MAX_SAMPLE_CHARS],
                reward=float(reward),
                source=source,
            )
        )

    def residuals(self, step: int, rows: Sequence[RowResidual]) -> None:
        """Emit what became of the peers' answers of one step, in several records where they are many."""
        for start in range(0, len(rows), ROWS_PER_RECORD):
            part = list(rows[start : start + ROWS_PER_RECORD])
            self._sink(ResidualsRecord(role=self.role, policy=self.policy, step=step, rows=part))

    def doing(self, text: str) -> None:
        """Say what the role does from now on, for example "training"; repeating the same text keeps its start."""
        with self._lock:
            if self._doing[0] != text:
                self._doing = (text, self._monotonic())

    @contextmanager
    def awaiting(self, what: str, *, whom: str = "", bound_s: float = 0.0) -> Iterator[None]:
        """While inside, heartbeats say that `what` is awaited from `whom`, given up after `bound_s`.

        Waits nest: the innermost shows, and the outer one shows again, with its own start, when the inner one ends.
        """
        wait = _Wait(what, whom, bound_s, self._monotonic())
        with self._lock:
            self._waits = (*self._waits, wait)
        try:
            yield
        finally:
            with self._lock:
                self._waits = tuple(other for other in self._waits if other is not wait)

    def beat(self) -> HeartbeatRecord:
        """The heartbeat of this moment; the caller sends it. Safe from any thread."""
        with self._lock:
            doing, waits = self._doing, self._waits
        wait = waits[-1] if waits else _Wait("", "", 0.0, doing[1])
        return HeartbeatRecord(
            role=self.role,
            policy=self.policy,
            pid=self.pid,
            time_unix_s=self._clock(),
            doing=doing[0][:MAX_LABEL_CHARS],
            awaiting=wait.what[:MAX_LABEL_CHARS],
            whom=wait.whom[:MAX_LABEL_CHARS],
            for_s=max(0.0, self._monotonic() - wait.since_s),
            bound_s=wait.bound_s,
        )
