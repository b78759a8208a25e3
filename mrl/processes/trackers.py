"""Trackers of a run, such as TensorBoard: each in a process of its own, fed from a bounded queue by a thread.

The supervisor never waits for a tracker: points that find no room in the queue are lost, and are counted and reported.
A tracker that ends or cannot start loses all later points; nothing restarts it before the next attempt of the run.
`metrics.jsonl` has every point, and `replay` gives all points to a tracker again.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from mrl.config.run_folder import RunFolder, dump_config, write_json
from mrl.config.schema import RunConfig, TrackerTable
from mrl.errors import RunFolderError
from mrl.metrics.jsonl import each_metrics
from mrl.metrics.rollout_files import path_of
from mrl.metrics.trackers.own_secrets import hidden, without_secrets
from mrl.metrics.trackers.sample_table import SampleFile
from mrl.metrics.trackers.tracker import Given, Reply, StartedRun, TrackedRun, num_points, points_of
from mrl.parent_death import command
from mrl.plugins import short_name
from mrl.records.telemetry_messages import MetricsRecord

MAX_QUEUED = 2_000
"""Records that wait for one tracker."""
MAX_BATCH = 200
"""Records in one message to a tracker's process."""
MAX_LOG_BYTES = 4 * 1024 * 1024
"""Bytes kept of what a tracker's package prints; later output is left out."""
FINISH_S = 30.0
"""Seconds that trackers have at the end of a run to send their last points."""
LOOK_S = 0.1
HURRIED_S = 2.0
"""Seconds for the same after a signal, when the prompt has to be back soon."""
PATIENCE_S = 120.0
"""Seconds that a replay waits for a tracker that takes no points."""
SEND_S = 1800.0
"""Seconds that a replay waits for a tracker's work at its end, such as an upload, during which it says nothing."""
KEEPS_ITS_OWN_PLACE = ("trackio",)
"""Kinds that keep the local runs of all projects in a folder of their own, where their dashboard looks."""
ARGV = (sys.executable, "-m", "mrl.metrics.trackers.tracker_process")

_reply = msgspec.json.Decoder(Reply)


class TrackerFeed:
    """Feeds one tracker's process. The main thread makes and closes it: the process dies with the thread that made it.

    Raises OSError when no process can be made.
    """

    def __init__(
        self, run: TrackedRun, *, label: str, id_file: Path | None, log: Path, argv: Sequence[str] = ARGV
    ) -> None:
        self.label, self._run, self._id_file = label, run, id_file
        self.num_taken = self.num_lost = 0
        """Points that the tracker took, and points that were lost."""
        self._changed = threading.Condition()
        self._queue: deque[Given] = deque()
        self._in_flight: list[Given] = []
        self._lines: deque[str] = deque()
        self._has_told_loss = self._is_over = self._is_closing = self._is_finishing = False
        self._process = subprocess.Popen(
            command(os.getpid(), tuple(argv)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=self._serve, name=f"tracker-{label}", daemon=True),
            threading.Thread(target=self._keep_log, args=(log,), name=f"tracker-log-{label}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, given: Given, *, wait_s: float = 0.0) -> None:
        """Queue points or a file of samples; what finds no room within `wait_s` is lost."""
        with self._changed:
            if wait_s:
                self._changed.wait_for(lambda: self._is_over or len(self._queue) < MAX_QUEUED, wait_s)
            if self._is_over or len(self._queue) >= MAX_QUEUED:
                self._lose(num_points(given), "the tracker is too slow, or hangs")
                return
            self._queue.append(given)
            self._changed.notify_all()

    def take_lines(self) -> list[str]:
        """Return the lines for people since the last call."""
        with self._changed:
            lines = list(self._lines)
            self._lines.clear()
        return lines

    def end(self) -> None:
        """Tell the tracker that no more points come, without waiting for its end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; return whether the tracker has finished or failed."""
        self._threads[0].join(timeout_s)
        return not self._threads[0].is_alive()

    def await_end(self) -> None:
        """Wait until the tracker has ended; at most PATIENCE_S without a point taken, SEND_S once all are taken."""
        seen, seen_s = (-1, False), time.monotonic()
        while not self.has_ended(LOOK_S):
            now = (self.num_taken + self.num_lost, self._is_finishing)
            if now != seen:
                seen, seen_s = now, time.monotonic()
            elif time.monotonic() - seen_s > (SEND_S if self._is_finishing else PATIENCE_S):
                break

    def close(self) -> None:
        """Kill the tracker's process, if it has not ended by itself, and all processes that it has started."""
        self.end()
        if not self.has_ended(0):
            self._give_up("the tracker did not finish in time")
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            thread.join(HURRIED_S)
        if self.num_lost:
            total = self.num_lost + self.num_taken
            cure = f"`mrl report RUN --to {self._run.kind}` sends all points again"
            self._lines.append(f"tracker {self.label}: {self.num_lost:,} of {total:,} points are lost; {cure}")

    # The methods below run in the threads.

    def _serve(self) -> None:
        try:
            failure = self._feed()
        except (OSError, ValueError, msgspec.MsgspecError) as error:  # the process has ended, or its pipes were closed
            failure = f"the tracker process ended ({type(error).__name__})"
        self._give_up(failure)

    def _give_up(self, why: str) -> None:
        """Count all queued points as lost; later points are lost, too."""
        with self._changed:
            self._is_over = True
            self._lose(sum(map(num_points, (*self._in_flight, *self._queue))), why)
            self._queue.clear()
            self._in_flight = []
            self._changed.notify_all()

    def _feed(self) -> str:
        """Feed the process until the end of the run; return why it ended or failed before, else ""."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with stdout:
            with stdin:
                reply = _asked(stdin, stdout, self._run)
                if reply is None or reply.started is None:
                    return (
                        reply.failure if reply else f"the tracker process ended with exit code {self._process.wait()}"
                    )
                self._note_start(reply.started)
                while batch := self._next_batch():
                    reply = _asked(stdin, stdout, batch)
                    if reply is None:
                        return f"the tracker process ended with exit code {self._process.wait()}"
                    self._note(reply)
            self._is_finishing = True
            reply = _read(stdout)
        return "the tracker did not finish" if reply is None else reply.failure

    def _next_batch(self) -> list[Given]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            self._in_flight = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            self._changed.notify_all()
            return self._in_flight

    def _note_start(self, started: StartedRun) -> None:
        if self._id_file is not None:
            what = {"kind": self._run.kind, "project": self._run.project, "run_id": started.run_id}
            self._id_file.parent.mkdir(exist_ok=True)
            write_json(self._id_file, what)
        with self._changed:
            self._lines.append(f"tracker {self.label}: {hidden(started.where, os.environ)}")

    def _note(self, reply: Reply) -> None:
        with self._changed:
            self._in_flight = []
            self.num_taken += reply.num_taken
            self._lose(reply.num_failed, reply.failure)

    def _lose(self, num_points: int, why: str) -> None:
        """Count lost points and tell the first reason; a failure that loses no points is told, too."""
        self.num_lost += num_points
        if why and not self._has_told_loss:
            self._has_told_loss = True
            self._lines.append(f"tracker {self.label}: {'points are lost' if num_points else 'failed'}: {why}")

    def _keep_log(self, log: Path) -> None:
        """Write what the tracker's package prints to its log, without the user's keys."""
        stderr = self._process.stderr
        assert stderr is not None
        room = MAX_LOG_BYTES
        with stderr, suppress(OSError, ValueError), log.open("ab", buffering=0) as file:
            for line in stderr:
                said = hidden(line.decode(errors="replace"), os.environ).encode()[:room]
                room -= file.write(said)


class Trackers:
    """The trackers that the supervisor of a run feeds."""

    def __init__(self, config: RunConfig, folder: RunFolder, attempt: Path) -> None:
        """Start the trackers. A tracker that cannot be started is reported like one that fails."""
        self._feeds: list[TrackerFeed] = []
        self._rollouts = folder.rollouts
        self._tables = dict(labelled(config.trackers))
        self._shown: dict[tuple[str, str], int] = {}
        """(tracker, policy) -> step of the newest samples that the tracker was given."""
        self._lines: list[str] = []
        for label, table in labelled(config.trackers):
            try:
                self._feeds.append(start_feed(config, folder, table, label=label, log=attempt / f"tracker_{label}.log"))
            except OSError as error:
                self._lines.append(f"tracker {label}: points are lost: {error.strerror}")

    def offer(self, record: MetricsRecord) -> None:
        """Queue a record for every tracker; never waits."""
        if self._feeds:
            points = points_of(record)
            for feed in self._feeds:
                feed.offer(points)
                file = samples_of(record, self._tables[feed.label], self._rollouts)
                if file and self._shown.get((feed.label, record.policy)) != record.step:
                    self._shown[feed.label, record.policy] = record.step
                    feed.offer(file)

    def take_lines(self) -> list[str]:
        """Return the lines of all trackers for people since the last call."""
        lines, self._lines = self._lines, []
        return lines + [line for feed in self._feeds for line in feed.take_lines()]

    def values(self) -> dict[str, float]:
        """Return as metrics the points that each tracker took and lost so far."""
        taken = {f"tracker/points/{feed.label}": float(feed.num_taken) for feed in self._feeds}
        return taken | {f"tracker/lost_points/{feed.label}": float(feed.num_lost) for feed in self._feeds}

    def close(self, timeout_s: float, *, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Let all trackers finish side by side, within `timeout_s` in all, or HURRIED_S once `is_hurried`."""
        began_s = time.monotonic()
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            while not feed.has_ended(LOOK_S):
                if time.monotonic() - began_s > (min(HURRIED_S, timeout_s) if is_hurried() else timeout_s):
                    break
            feed.close()


def samples_of(record: MetricsRecord, table: TrackerTable, rollouts: Path) -> SampleFile | None:
    """Return the file of answers that a tracker shows for the step of a learner's record; None where it shows none."""
    is_step = record.role.startswith("learner/") and record.step > 0
    if not (table.samples and is_step and record.step % table.samples_every == 0):
        return None
    path = path_of(rollouts, record.policy, record.step)
    return SampleFile(path=str(path), num_rows=table.samples, time_unix_s=record.time_unix_s)


def labelled(tables: Sequence[TrackerTable]) -> list[tuple[str, TrackerTable]]:
    """Return each table with a label of its own: its kind, with a number from the second table of a kind on."""
    kinds = [short_name(table.kind) for table in tables]
    counts = [kinds[:place].count(kind) + 1 for place, kind in enumerate(kinds)]
    return [(f"{kind}-{n}" if n > 1 else kind, table) for kind, n, table in zip(kinds, counts, tables, strict=True)]


def files_of(folder: RunFolder, table: TrackerTable, label: str) -> str:
    """Return the folder of a tracker's files; "" where the tracker keeps them in a place of its own."""
    own_place = "" if table.kind in KEEPS_ITS_OWN_PLACE else str(folder.path / "trackers" / label)
    return str(Path(table.folder).absolute()) if table.folder else own_place


def start_feed(
    config: RunConfig, folder: RunFolder, table: TrackerTable, *, label: str, log: Path, name: str = ""
) -> TrackerFeed:
    """Start a tracker for a run, or continue its run of an earlier attempt. Raises OSError."""
    id_file = folder.path / "trackers" / f"{label}.json"
    run = TrackedRun(
        kind=table.kind,
        project=table.project,
        name=name or table.name or config.run.name,
        run_id=_earlier_id(id_file, table),
        folder=files_of(folder, table, label),
        options=table.options,
        config=without_secrets(dump_config(config), os.environ),
    )
    return TrackerFeed(run, label=label, id_file=id_file, log=log)


def _earlier_id(id_file: Path, table: TrackerTable) -> str:
    """Return the id that this tracker gave the run before; "" for a run new to it, or kept in another project."""
    try:
        noted: Any = msgspec.json.decode(id_file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return ""
    is_same = isinstance(noted, dict) and (noted.get("kind"), noted.get("project")) == (table.kind, table.project)
    return str(noted.get("run_id", "")) if is_same else ""


def _asked(stdin: IO[bytes], stdout: IO[bytes], what: object) -> Reply | None:
    stdin.write(msgspec.json.encode(what) + b"\n")
    stdin.flush()
    return _read(stdout)


def _read(stdout: IO[bytes]) -> Reply | None:
    """Return the next reply; None when the process has ended."""
    line = stdout.readline()
    return _reply.decode(line) if line else None


def replay(config: RunConfig, folder: RunFolder, table: TrackerTable) -> Iterator[str]:
    """Give a tracker all of `metrics.jsonl`, as a run of its own beside the run that it was fed live.

    The tracker also gets samples of the steps whose answers the run has kept.

    Yields lines to tell. Raises RunFolderError when points were lost, OSError when no process can be made.
    """
    label, name = _free_label(folder, table, config.run.name)
    folder.path.joinpath("trackers").mkdir(exist_ok=True)
    feed = start_feed(config, folder, table, label=label, log=folder.path / "trackers" / f"{label}.log", name=name)
    shown: set[str] = set()
    for line in each_metrics(folder.metrics_jsonl):
        if line.keys() >= set(MetricsRecord.__struct_fields__):
            record = MetricsRecord(**{part: line[part] for part in MetricsRecord.__struct_fields__})
            feed.offer(points_of(record), wait_s=0.0 if feed.num_lost else PATIENCE_S)
            file = samples_of(record, table, folder.rollouts)
            if file and file.path not in shown and Path(file.path).exists():
                shown.add(file.path)
                feed.offer(file, wait_s=0.0 if feed.num_lost else PATIENCE_S)
    feed.end()
    feed.await_end()
    feed.close()
    yield from feed.take_lines()
    yield f"{feed.num_taken:,} points sent to {table.kind} as {name}"
    if feed.num_lost:
        raise RunFolderError(
            f"{feed.num_lost:,} points did not reach {table.kind}",
            where=str(folder.path),
            cure=f"see {folder.path}/trackers/{label}.log, then run the same command again",
        )


def _free_label(folder: RunFolder, table: TrackerTable, run_name: str) -> tuple[str, str]:
    """Return (label, name) of a replay, both unused: a tracker must not have the same steps twice in one run."""
    name = table.name or run_name
    for number in itertools.count(1):
        suffix = "-replay" + f"-{number}" * (number > 1)
        if not list((folder.path / "trackers").glob(f"{short_name(table.kind)}{suffix}.*")):
            return f"{short_name(table.kind)}{suffix}", f"{name}{suffix}"
    raise AssertionError
