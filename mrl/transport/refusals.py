"""Refusals of a server: counted by reason, and logged at a bounded rate."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import structlog

WINDOW_S = 10.0
MAX_NAMED = 64
OTHERS = "others"

log = structlog.get_logger()


@dataclass(slots=True)
class _Window:
    """A window of ten seconds for one reason and one refused party, opened by a log line."""

    ends_s: float
    suppressed: int = 0


class Refusals:
    """Logs one line per reason and party when refusals begin, then one per window with a count. Thread-safe.

    Parties are named by the caller (a key's fingerprint). Of a crowd the first 64 are named and the rest share one
    name, so that fresh keys for every attempt fill neither the log nor the memory.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._windows: dict[tuple[str, str], _Window] = {}

    def counts(self) -> dict[str, int]:
        """Return the numbers of refusals so far, by reason."""
        with self._lock:
            return dict(self._counts)

    def note(self, reason: str, who: str, **details: object) -> None:
        """Count a refusal of `who`, and log it unless the same was logged in the last ten seconds."""
        now_s = self._clock()
        with self._lock:
            self._counts[reason] += 1
            if (reason, who) not in self._windows and len(self._windows) >= MAX_NAMED:
                who, details = OTHERS, {}
            window = self._windows.get((reason, who))
            if window is not None:
                window.suppressed += 1
                return
            self._windows[reason, who] = _Window(now_s + WINDOW_S)
        log.warning("client refused", reason=reason, who=who, **details)

    def settle(self) -> None:
        """Close windows that are over; a window with suppressed lines leaves one line and begins anew."""
        now_s = self._clock()
        told: list[tuple[str, str, int]] = []
        with self._lock:
            for (reason, who), window in list(self._windows.items()):
                if now_s < window.ends_s:
                    continue
                if window.suppressed:
                    told.append((reason, who, window.suppressed))
                    self._windows[reason, who] = _Window(now_s + WINDOW_S)
                else:
                    del self._windows[reason, who]
        for reason, who, suppressed in told:
            log.warning("client refused again", reason=reason, who=who, suppressed=suppressed, within_s=WINDOW_S)
