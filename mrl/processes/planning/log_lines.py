"""Read the log of a process: lines that a person should see at once, and the reason of the process's end."""

import json
import re
from collections.abc import Sequence

ERROR_PREFIX = "mrl: error: "
_LOUD = {"warning", "error", "critical"}
_EXCEPTION = re.compile(r"^(?:[\w]+\.)*\w*(?:Error|Exception|Lost|Failed|Interrupt|Exit)\b.*")
_LAUNCHER = re.compile(r"[EWI]\d{4} .*torch/distributed/elastic/")
"""A line that torchrun logs itself."""
_TRACEBACK = "Traceback (most recent call last):"
_RANK_CODE = re.compile(r"exitcode\s*:\s*(-?\d+)")


def loud_line(line: str) -> str | None:
    """Return a warning or an error as a person should see it; None for every other line."""
    if line.startswith(ERROR_PREFIX):
        return line
    event = _event(line)
    if event is None or event.get("level") not in _LOUD:
        return None
    return f"{event['level']}: {_told(event)}"


def reason_in(lines: Sequence[str]) -> str:
    """Return the line that says best why a process ended: mrl's own, else a logged error, an exception, the last."""
    for line in reversed(lines):
        if line.startswith(ERROR_PREFIX):
            return line.removeprefix(ERROR_PREFIX)
    for line in reversed(lines):
        event = _event(line)
        if event is not None and event.get("level") in {"error", "critical"}:
            return str(event["reason"]) if "reason" in event else _told(event)
    exceptions = [line for line in lines if _EXCEPTION.match(line) and "ChildFailedError" not in line]
    spoken = [line.strip() for line in lines if line.strip(" =-")]
    return exceptions[-1] if exceptions else spoken[-1] if spoken else "no output"


def without_launcher(lines: Sequence[str]) -> list[str]:
    """Return the lines without torchrun's own after a rank has failed: its traceback, and where the rank ran."""
    kept = [line for line in lines if not _LAUNCHER.match(line)]
    for place, line in enumerate(kept):
        if "ChildFailedError" in line:
            starts = [start for start in range(place) if kept[start].startswith(_TRACEBACK)]
            return kept[: starts[-1] if starts else place] or list(lines)
    return kept or list(lines)


def rank_code(code: int, lines: Sequence[str]) -> int:
    """Return the exit code of the first rank that failed under torchrun, which itself always exits with 1."""
    codes = _RANK_CODE.findall("\n".join(lines))
    return int(codes[-1]) if code == 1 and codes else code


def _event(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _told(event: dict[str, object]) -> str:
    hidden = {"level", "event", "timestamp", "role", "policy", "logger", "exception"}
    details = " ".join(f"{key}={value}" for key, value in event.items() if key not in hidden)
    return f"{event.get('event', '')} {details}".strip() + _raised(event)


def _raised(event: dict[str, object]) -> str:
    trace = event.get("exception")
    last = trace[-1] if isinstance(trace, list) and trace else None
    return f" ({last.get('exc_type')}: {last.get('exc_value')})" if isinstance(last, dict) else ""
