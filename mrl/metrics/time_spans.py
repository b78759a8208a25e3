"""Activities and waits of one role as spans of time, in lanes: one for the role itself, and one for each kind of
activity of its other threads.

The number of spans does not grow with the speed of a role. Adjacent spans of one kind are joined. The time of a short
span is lent to the span before it. Lent time comes back as one span once its sum is no longer short, so that the sums
of all kinds stay right.
"""

from collections import deque
from typing import NamedTuple

SHORT_S = 0.005
PIECE_S = 5.0
"""A longer span is reported in pieces, so that it shows while it lasts."""
MAX_KEPT = 2000
"""Bound of the spans in a lane that are not taken yet; beyond it the oldest are dropped."""


class Activity(NamedTuple):
    """An activity or a wait of a role."""

    kind: str
    whom: str = ""
    """The role that is awaited, or the subject of the activity."""
    is_wait: bool = False


class EndedSpan(NamedTuple):
    """A finished span, or a finished piece of a span. Times are those of the role's monotonic clock."""

    activity: Activity
    began_s: float
    duration_s: float

    @property
    def ended_s(self) -> float:
        """Time of the span's end."""
        return self.began_s + self.duration_s


class Lane:
    """Spans without overlap, at most the newest `most`."""

    def __init__(self, *, short_s: float = SHORT_S, piece_s: float = PIECE_S, most: int | None = MAX_KEPT) -> None:
        self._short_s, self._piece_s = short_s, piece_s
        self._ended: deque[EndedSpan] = deque(maxlen=most)
        self._lent_s: dict[tuple[Activity, Activity], float] = {}

    def add(self, activity: Activity, began_s: float, ended_s: float) -> None:
        """Append a span that begins at the end of the last span, or later."""
        span = EndedSpan(activity, began_s, ended_s - began_s)
        last = self._ended[-1] if self._ended else None
        if span.duration_s <= 0.0:
            return
        if last is None or began_s - last.ended_s >= self._short_s:
            self._ended.append(span)
        elif last.activity == activity and last.duration_s + span.duration_s <= self._piece_s:
            self._lengthen(last, span.duration_s)
        elif last.activity == activity or span.duration_s >= self._short_s:
            self._ended.append(span)
        else:
            self._lend(last, span)

    @property
    def ended(self) -> list[EndedSpan]:
        """All spans of the lane, oldest first."""
        return list(self._ended)

    def take(self, most: int) -> list[EndedSpan]:
        """Remove and return the oldest spans, at most `most`."""
        return [self._ended.popleft() for _ in range(min(most, len(self._ended)))]

    def _lengthen(self, last: EndedSpan, duration_s: float) -> None:
        self._ended[-1] = last._replace(duration_s=last.duration_s + duration_s)

    def _lend(self, last: EndedSpan, span: EndedSpan) -> None:
        pair = last.activity, span.activity
        lent_s = self._lent_s.pop(pair, 0.0) + span.duration_s
        left_s = last.duration_s + span.duration_s - lent_s
        if lent_s < self._short_s or left_s <= 0.0:
            self._lent_s[pair] = lent_s
            self._lengthen(last, span.duration_s)
        else:
            self._ended[-1] = last._replace(duration_s=left_s)
            self._ended.append(EndedSpan(span.activity, last.began_s + left_s, lent_s))


class GoingOn:
    """An activity without an end yet."""

    def __init__(self, activity: Activity, since_s: float) -> None:
        self.activity, self.since_s = activity, since_s


class SpanRecorder:
    """All lanes of one role. Callers hold a lock."""

    def __init__(self, activity: Activity, now_s: float) -> None:
        self._own, self._beside = Lane(), dict[str, Lane]()
        self._now = GoingOn(activity, now_s)
        self._going_on: list[GoingOn] = []

    def turn_to(self, activity: Activity, now_s: float) -> None:
        """Set the role's own activity from `now_s` on."""
        if activity != self._now.activity:
            self._own.add(self._now.activity, self._now.since_s, now_s)
            self._now = GoingOn(activity, now_s)

    def begin(self, kind: str, now_s: float) -> GoingOn:
        """Begin an activity of another thread, at most one per kind; the returned value is for `end`."""
        going = GoingOn(Activity(kind), now_s)
        self._beside.setdefault(kind, Lane())
        self._going_on.append(going)
        return going

    def end(self, going: GoingOn, now_s: float) -> None:
        """End an activity of another thread."""
        self._going_on = [other for other in self._going_on if other is not going]
        self._beside[going.activity.kind].add(going.activity, going.since_s, now_s)

    def take(self, now_s: float, most: int, *, is_last: bool = False) -> tuple[list[EndedSpan], list[EndedSpan]]:
        """Remove and return finished spans, those of the role and those of other threads, at most `most` together.

        A long activity is cut at `now_s`, and its first piece counts as finished. With `is_last` every activity is
        cut.
        """
        for going in (self._now, *self._going_on):
            if is_last or now_s - going.since_s >= PIECE_S:
                lane = self._own if going is self._now else self._beside[going.activity.kind]
                lane.add(going.activity, going.since_s, now_s)
                going.since_s = now_s
        own, beside = self._own.take(most), list[EndedSpan]()
        for lane in self._beside.values():
            beside += lane.take(most - len(own) - len(beside))
        return own, beside
