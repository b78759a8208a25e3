"""Refusals are all counted, and logged at a bounded rate."""

import pytest
from structlog.testing import capture_logs

from mrl.transport.refusals import MAX_NAMED, WINDOW_S, Refusals


class Clock:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def refusals(clock):
    return Refusals(clock=clock)


def test_all_are_counted_and_one_line_is_written(refusals):
    """Per party and reason."""
    with capture_logs() as lines:
        for _ in range(1000):
            refusals.note("unknown_key", "ab12", name="worker/qwen")
        refusals.note("unknown_key", "cd34")
        refusals.note("role", "ab12")
    assert refusals.counts() == {"unknown_key": 1001, "role": 1}
    assert refusals.counts().get("revoked_key", 0) == 0
    assert [(line["reason"], line["who"]) for line in lines] == [
        ("unknown_key", "ab12"), ("unknown_key", "cd34"), ("role", "ab12")
    ]  # fmt: skip
    assert lines[0]["name"] == "worker/qwen"


def test_what_was_suppressed_is_told_once_per_window(refusals, clock):
    """Nothing before the ten seconds are over, and nothing of windows without any."""
    with capture_logs() as lines:
        refusals.note("unknown_key", "quiet")
        for _ in range(5):
            refusals.note("unknown_key", "loud")
        clock.now_s = WINDOW_S - 0.1
        refusals.settle()
        assert len(lines) == 2
        clock.now_s = WINDOW_S
        refusals.settle()
        refusals.note("unknown_key", "loud")
        refusals.settle()
        refusals.note("unknown_key", "quiet")
    assert [(line["event"], line["who"], line.get("suppressed")) for line in lines] == [
        ("client refused", "quiet", None),
        ("client refused", "loud", None),
        ("client refused again", "loud", 4),
        ("client refused", "quiet", None),
    ]


def test_a_crowd_shares_one_line(refusals, clock):
    """Fresh keys for every attempt neither fill the log nor the memory, and are forgotten afterwards."""
    with capture_logs() as lines:
        for number in range(10_000):
            refusals.note("unknown_key", f"key {number}")
        assert len(lines) == MAX_NAMED + 1
        assert lines[-1]["who"] == "others"
        clock.now_s = WINDOW_S
        refusals.settle()
        assert lines[-1]["suppressed"] == 10_000 - MAX_NAMED - 1
        clock.now_s = 2 * WINDOW_S
        refusals.settle()
    assert refusals.counts() == {"unknown_key": 10_000}
    assert refusals._windows == {}
