"""Logging of a process."""

import io
import json
import logging
import threading
import warnings
from typing import Any

import pytest
import structlog

from mrl.metrics.logging import configure_logging


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_events_are_json_with_role_policy_and_level_off_a_terminal() -> None:
    """Every event is one JSON object that carries who spoke."""
    stream = io.StringIO()
    configure_logging("learner/qwen", "qwen", stream=stream)
    structlog.contextvars.bind_contextvars(version="0.3")
    structlog.get_logger("mrl.test").info("step done", groups=4)
    structlog.get_logger("mrl.test").debug("hidden")
    (event,) = events(stream)
    expected = {"event": "step done", "groups": 4, "role": "learner/qwen", "policy": "qwen", "level": "info"}
    assert expected.items() <= event.items()
    assert event["version"] == "0.3"
    assert event["timestamp"].endswith("Z")


def test_role_is_bound_in_every_thread() -> None:
    """A thread that was started later still says whose it is."""
    stream = io.StringIO()
    configure_logging("exchange", stream=stream)
    thread = threading.Thread(target=lambda: structlog.get_logger().warning("from a thread"))
    thread.start()
    thread.join()
    (event,) = events(stream)
    assert event["role"] == "exchange"
    assert "policy" not in event


def test_the_standard_library_takes_the_same_road() -> None:
    """Lines of third parties and Python warnings come out as the same JSON."""
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("worker/qwen/0", "qwen", stream=stream)
        logging.getLogger("third.party").warning("loaded %d rows", 3)
        warnings.warn("old option", stacklevel=1)
    first, second = events(stream)
    assert (first["event"], first["role"], first["logger"]) == ("loaded 3 rows", "worker/qwen/0", "third.party")
    assert "old option" in second["event"]


def _fail(key: str) -> None:
    raise ValueError("no such row")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_tracebacks_hold_no_local_variables(stream: io.StringIO) -> None:
    """Neither form of the traceback shows the values that the frames held."""
    configure_logging("learner/qwen", "qwen", stream=stream)
    try:
        _fail("the-se" + "cret")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "no such row" in stream.getvalue()
    assert "the-secret" not in stream.getvalue()


def test_a_terminal_gets_readable_lines() -> None:
    """On a terminal the event is a line of text, not JSON."""
    stream = Terminal()
    configure_logging("learner/qwen", "qwen", stream=stream)
    structlog.get_logger().info("ready")
    assert not stream.getvalue().startswith("{")
    assert "ready" in stream.getvalue()


def test_configuring_twice_does_not_double_lines() -> None:
    """The last call wins."""
    stream = io.StringIO()
    configure_logging("a", stream=stream)
    configure_logging("b", stream=stream)
    structlog.get_logger().info("once")
    assert [event["role"] for event in events(stream)] == ["b"]
