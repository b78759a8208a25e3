"""What a draining daemon still has to do."""

import msgspec
from logged_core import LoggedCore
from see_daemon import left_over

from mrl.records.exchange_messages import ClientState, StreamState

IDLE = LoggedCore().stat(0.0)


def stream(**changes):
    """A reader that has everything."""
    fields = {"policy": "a", "stream": "all", "reader": "learner/a", "sent": 7, "took": 7, "committed": 3, "waiting": 0}
    return StreamState(**fields | changes)


def left(before=None, **changes):
    """Of an idle daemon with these changes."""
    return left_over(msgspec.structs.replace(IDLE, **changes), before)


def test_an_idle_daemon_has_nothing_left():
    """Also with a reader that took all, committed or not."""
    assert left() == []
    assert left(streams=[stream()]) == []


def test_everything_that_is_open_is_named():
    """With its number."""
    waiting = ClientState(client="c", policy="a", silent_s=0.0, parked_puts=0, claims=0, queued=4)
    assert left(unstored=1, claims=2, unserved=3, sessions=[waiting]) == [
        "1 Puts on their way to the log",
        "2 records delivered and not acknowledged",
        "4 records queued for clients",
        "3 requests that nobody has been given",
    ]


def test_a_reader_that_has_not_taken_all_is_named():
    """As well as a stream that nobody reads."""
    assert left(streams=[stream(took=6)]) == ["stream all of a: learner/a has not taken all it was sent"]
    assert left(streams=[stream(reader="", waiting=5)]) == ["stream all of a is read by nobody, 5 records behind"]
    assert left(streams=[stream(reader="", took=6)]) == ["stream all of a is read by nobody, 0 records behind"]
    assert left(streams=[stream(reader="")]) == []


def test_records_that_a_reader_does_not_want_are_not_waited_for():
    """It took all it was sent, and nothing more was sent until the next look."""
    behind = [stream(waiting=5)]
    assert left(streams=behind) == ["stream all of a: 5 records behind"]
    assert left(msgspec.structs.replace(IDLE, streams=behind), streams=behind) == []
    for earlier in (stream(waiting=9), stream(waiting=5, sent=6, took=6)):
        before = msgspec.structs.replace(IDLE, streams=[earlier])
        assert left(before, streams=behind) == ["stream all of a: 5 records behind"]
