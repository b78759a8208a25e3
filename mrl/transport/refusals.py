"""What a server refused: counted by reason, and logged at a bounded rate."""

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
    """Ten seconds of one reason and one refused party, after the line that opened them."""

    ends_s: float
    suppressed: int = 0


class Refusals:
    """One log line per reason and party when it begins and one per window with what was suppressed. Thread-safe.

    Parties are named by the caller (a key's fingerprint). Of a crowd the first 64 are named, the rest share one name,
    so that fresh keys for every attempt neither fill the log nor the memory.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._windows: dict[tuple[str, str], _Window] = {}

    def counts(self) -> dict[str, int]:
        """Refusals so far, by reason."""
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
        log.warning("refused", reason=reason, who=who, **details)

    def settle(self) -> None:
        """Close windows that are over; those in which something was suppressed leave a line and go on."""
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
            log.warning("refused again", reason=reason, who=who, suppressed=suppressed, within_s=WINDOW_S)
