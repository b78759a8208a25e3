"""Telemetry of one role: metrics, samples, heartbeats, and its activities and waits as spans of time.

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
from mrl.metrics.time_spans import Activity, EndedSpan, SpanRecorder
from mrl.records.readable_turns import ReadableTurn
from mrl.records.telemetry_messages import (
    HeartbeatRecord,
    MetricsRecord,
    SampleRecord,
    Span,
    SpansRecord,
    TelemetryRecord,
)

MAX_LABEL_CHARS = 200
MAX_SAMPLE_CHARS = 20_000
MAX_FAILURE_CHARS = 1_000
SPANS_PER_RECORD = 500


class _Wait(NamedTuple):
    what: str
    whom: str
    bound_s: float
    since_s: float


class _Deed(NamedTuple):
    kind: str
    about: str
    since_s: float

    @property
    def text(self) -> str:
        return f"{self.kind} {self.about}".rstrip()


class Telemetry:
    """Emits the telemetry of one role.

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
        self._doing = _Deed("starting", "", monotonic())
        self._waits: tuple[_Wait, ...] = ()
        self._spans = SpanRecorder(Activity("starting"), self._doing.since_s)

    def metrics(self, step: int, values: Mapping[str, float], *, policy: str | None = None) -> None:
        """Emit values measured at `step`; `policy` is for roles that serve several policies.

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
        rewards: Mapping[str, float] | None = None,
        failure: str = "",
        opening: str = "",
        turns: Sequence[ReadableTurn] = (),
    ) -> None:
        """Emit one answer for people to read; kinds are those of `SampleRecord`. Long texts are cut."""
        self._sink(
            SampleRecord(
                policy=self.policy,
                step=step,
                kind=kind,
                task=task,
                prompt=prompt[:MAX_SAMPLE_CHARS],
                completion=completion[:MAX_SAMPLE_CHARS],
                reward=float(reward),
                source=source,
                rewards=dict(rewards or {}),
                failure=failure[:MAX_FAILURE_CHARS],
                opening=opening[:MAX_SAMPLE_CHARS],
                turns=list(turns),
            )
        )

    def doing(self, kind: str, about: str = "") -> None:
        """Set the role's activity from now on, for example "training"; the same activity again keeps its start.

        `kind` is one of a few words; `about` says more, for example the step.
        """
        with self._lock:
            if self._doing[:2] != (kind, about):
                self._doing = _Deed(kind, about, self._monotonic())
                self._turn()

    @contextmanager
    def awaiting(
        self, what: str, *, whom: str = "", bound_s: float = 0.0, since_s: float | None = None
    ) -> Iterator[None]:
        """Show a wait for `what` from `whom`, with its bound `bound_s`, in heartbeats and spans while the block runs.

        `since_s`, a time of `monotonic`, is the start of a wait that began earlier, such as a wait in slices of time.

        Waits nest: the innermost shows, and the outer one shows again, with its own start, when the inner one ends.
        """
        wait = _Wait(what, whom, bound_s, self._monotonic() if since_s is None else since_s)
        with self._lock:
            self._waits = (*self._waits, wait)
            self._turn()
        try:
            yield
        finally:
            with self._lock:
                self._waits = tuple(other for other in self._waits if other is not wait)
                self._turn()

    @contextmanager
    def beside(self, kind: str) -> Iterator[None]:
        """Record activity `kind` of another thread while the block runs, beside the role's own activity or wait.

        One thread at a time may have an activity of one kind.
        """
        with self._lock:
            going = self._spans.begin(kind, self._monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._spans.end(going, self._monotonic())

    def tell_spans(self, *, is_last: bool = False) -> None:
        """Emit spans since the last call, one record at most; safe from any thread, best called once a second.

        A span that goes on is emitted in pieces of some seconds; with `is_last` it is cut at this moment.
        """
        with self._lock:
            now_s = self._monotonic()
            own, beside = self._spans.take(now_s, SPANS_PER_RECORD, is_last=is_last)
        if own or beside:
            zero_unix_s = self._clock() - now_s
            spans = [_span(one, zero_unix_s) for one in own]
            spans += [_span(one, zero_unix_s, is_beside=True) for one in beside]
            self._sink(SpansRecord(role=self.role, policy=self.policy, spans=spans))

    def beat(self) -> HeartbeatRecord:
        """Return the heartbeat of this moment, for the caller to send. Safe from any thread."""
        with self._lock:
            doing, waits = self._doing, self._waits
        wait = waits[-1] if waits else _Wait("", "", 0.0, doing.since_s)
        return HeartbeatRecord(
            role=self.role,
            policy=self.policy,
            pid=self.pid,
            time_unix_s=self._clock(),
            doing=doing.text[:MAX_LABEL_CHARS],
            awaiting=wait.what[:MAX_LABEL_CHARS],
            whom=wait.whom[:MAX_LABEL_CHARS],
            for_s=max(0.0, self._monotonic() - wait.since_s),
            bound_s=wait.bound_s,
            monotonic_s=self._monotonic(),
        )

    def _turn(self) -> None:
        """Begin the span of the innermost wait, or else of the activity, unless it is going on already."""
        if self._waits:
            activity = Activity(f"awaiting {self._waits[-1].what}", self._waits[-1].whom, is_wait=True)
        else:
            activity = Activity(self._doing.kind, self._doing.about)
        self._spans.turn_to(activity, self._monotonic())


def _span(ended: EndedSpan, zero_unix_s: float, *, is_beside: bool = False) -> Span:
    return Span(
        kind=ended.activity.kind[:MAX_LABEL_CHARS],
        whom=ended.activity.whom[:MAX_LABEL_CHARS],
        is_wait=ended.activity.is_wait,
        is_beside=is_beside,
        began_unix_s=max(0.0, zero_unix_s + ended.began_s),
        duration_s=ended.duration_s,
    )
