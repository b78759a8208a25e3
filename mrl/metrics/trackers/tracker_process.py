"""Process of one tracker: `python -m mrl.metrics.trackers.tracker_process`.

The process reads JSON lines, first a `TrackedRun` and then lists of points and sample files, and writes one `Reply` for
each line; the end of its input is the end of the run. Output of the tracker's package goes to stderr. Any exception of
the package becomes a reply.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from mrl.metrics.trackers.kinds import tracker_class
from mrl.metrics.trackers.own_secrets import hidden
from mrl.metrics.trackers.sample_table import read_table
from mrl.metrics.trackers.tracker import Given, Points, Reply, TrackedRun, Tracker, num_points

MAX_FAILURE_CHARS = 300

_run = msgspec.json.Decoder(TrackedRun)
_given = msgspec.json.Decoder(list[Given])


def serve(lines: BinaryIO, say: Callable[[Reply], object]) -> None:
    """Run one tracker until the lines end."""
    run = _run.decode(lines.readline())
    try:
        tracker = tracker_class(run.kind, where="trackers")()
        started = tracker.start(run)
    except Exception as error:  # noqa: BLE001 - the outer edge of a process that is there to fail alone
        say(Reply(failure=_told(error)))
        return
    say(Reply(started=started))
    for line in lines:
        taken = failed = 0
        failure = ""
        for given in _given.decode(line):
            try:
                _give(tracker, given)
                taken += num_points(given)
            except Exception as error:  # noqa: BLE001 - as above
                failed, failure = failed + num_points(given), _told(error)
        say(Reply(num_taken=taken, num_failed=failed, failure=failure))
    try:
        tracker.finish()
    except Exception as error:  # noqa: BLE001 - as above
        say(Reply(failure=_told(error)))
        return
    say(Reply())


def _give(tracker: Tracker, given: Given) -> None:
    if isinstance(given, Points):
        tracker.log(given)
    else:
        tracker.table(read_table(given))


def _told(error: Exception) -> str:
    """Describe an error in one line, without the user's keys."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return hidden(text, os.environ)[:MAX_FAILURE_CHARS]


def _main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):  # a batch system sends both to all; the supervisor ends this process
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # packages print to stdout
    serve(sys.stdin.buffer, lambda reply: replies.write(msgspec.json.encode(reply) + b"\n"))
    sys.stderr.flush()
    os._exit(0)  # what a package wants to do at exit may hang


if __name__ == "__main__":
    _main()
