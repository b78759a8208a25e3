"""Data of the timeline: activities and waits of every role, over the whole run and, span by span, in a window of it.

The timeline file is read twice and never held in memory, which does not grow with the length of a run.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from mrl.metrics.time_spans import Activity, Lane
from mrl.metrics.timeline import FiledSpan, every_minutes, is_kept, read_timeline

WINDOW_S = 25.0
"""Length of the window in seconds, unless WINDOW_STEPS steps take longer or learning was shorter."""
WINDOW_STEPS = 4
SHORT_SHARE = 1 / 2000
"""Share of the window; shorter spans are drawn together."""
BINS = 150
"""Number of equal parts of the whole run, in which times are summed."""

StepEnds = Mapping[str, Sequence[tuple[float, float]]]
"""Policy -> (unix s, learner step)."""


class Extent(NamedTuple):
    """A stretch of time, in unix seconds."""

    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.begin_s

    def overlap_s(self, span: FiledSpan) -> float:
        """Return the seconds of a span that lie within this stretch."""
        return max(0.0, min(self.end_s, span.ended_unix_s) - max(self.begin_s, span.began_unix_s))


NEVER = Extent(0.0, 0.0)


class Share(NamedTuple):
    """An activity or a wait of a role, to sum its time by."""

    kind: str
    whom: str
    """Role that is awaited; empty for activities."""
    is_wait: bool
    is_beside: bool
    """Whether another thread of the role did it, beside the role's own activity."""


@dataclass(slots=True)
class Timeline:
    """Timeline of one run; empty when the run has no timeline file."""

    whole: Extent = NEVER
    learning: dict[str, Extent] = field(default_factory=dict)
    """Policy -> time from its first end of a step to its last, "" for all policies; absent without two ends."""
    window: Extent = NEVER
    """Part of the run that is drawn span by span."""
    seconds: dict[str, dict[Share, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    """Role -> activity or wait -> its seconds within `learning_of` the role."""
    bins: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(_no_bins))
    """Role -> `BINS` parts of the whole run -> kind -> seconds, without other threads; all waits are of kind ""."""
    lanes: dict[tuple[str, str], Lane] = field(default_factory=dict)
    """(role, "" or the kind of activity of other threads) -> spans within the window, in unix time."""
    step_ends: StepEnds = field(default_factory=dict)
    every_minutes: int = 1
    """The file holds one minute of this many; see `mrl.metrics.timeline`."""
    problems: list[str] = field(default_factory=list)

    def learning_of(self, role: str) -> Extent:
        """Return the time that is 100 % for a role: while its policy learned, else while any did, else the whole."""
        policy = role.partition("/")[2].partition("/")[0]
        return self.learning.get(policy) or self.learning.get("") or self.whole

    def roles(self, policies: Sequence[str]) -> list[str]:
        """Return roles by policy, learners first, without roles of one kind of activity or none beside starting."""
        told = {role: {what.kind for what in found if not what.is_wait} for role, found in self.seconds.items()}
        ranks = {"learner": 0, "worker": 1}

        def place(role: str) -> tuple[int, int, str]:
            kind, _, rest = role.partition("/")
            policy = rest.partition("/")[0]
            return policies.index(policy) if policy in policies else len(policies), ranks.get(kind, len(ranks)), role

        return sorted((role for role, kinds in told.items() if len(kinds - {"starting"}) > 1), key=place)


def run_timeline(path: Path, step_ends: StepEnds) -> Timeline:
    """Read a run's `timeline.jsonl`, which may be missing. `problems` names damage."""
    timeline = Timeline(step_ends=step_ends)
    try:
        whole = _whole(path)
        if whole is None:
            return timeline
        timeline.every_minutes, timeline.whole = every_minutes(path), whole
        times = sorted(time_s for ends in step_ends.values() for time_s, _ in ends)
        timeline.learning = _learning(step_ends)
        timeline.window = _window(timeline, times)
        for span in read_timeline(path, timeline.problems.append):
            _take(timeline, span)
    except OSError as error:
        timeline.problems.append(str(error))
    return timeline


def _whole(path: Path) -> Extent | None:
    begin_s, end_s = float("inf"), 0.0
    for span in read_timeline(path):
        begin_s, end_s = min(begin_s, span.began_unix_s), max(end_s, span.ended_unix_s)
    return Extent(begin_s, end_s) if begin_s < end_s else None


def _learning(step_ends: StepEnds) -> dict[str, Extent]:
    together = {"": [end for ends in step_ends.values() for end in ends]}
    times = {policy: [time_s for time_s, _ in ends] for policy, ends in (together | dict(step_ends)).items()}
    return {name: Extent(min(some), max(some)) for name, some in times.items() if some and min(some) < max(some)}


def _window(timeline: Timeline, times: Sequence[float]) -> Extent:
    """Window around the end of a step, in the middle of those that the file holds from while all policies learned."""
    paces = [(ends[-1][0] - ends[0][0]) / (len(ends) - 1) for ends in timeline.step_ends.values() if len(ends) > 1]
    within = timeline.learning_of("")
    length_s = min(max(WINDOW_S, WINDOW_STEPS * median(paces) if paces else 0.0), within.duration_s)
    learning = [extent for policy, extent in timeline.learning.items() if policy]
    together = [time_s for time_s in times if all(one.begin_s <= time_s <= one.end_s for one in learning)] or times
    kept = [time_s for time_s in together if is_kept(time_s, timeline.every_minutes)]
    middle_s = kept[len(kept) // 2] if kept else sum(timeline.whole) / 2
    begin_s = max(within.begin_s, min(middle_s - length_s / 2, within.end_s - length_s))
    return Extent(begin_s, begin_s + length_s)


def _take(timeline: Timeline, span: FiledSpan) -> None:
    what = Share(span.kind, span.whom if span.is_wait else "", span.is_wait, span.is_beside)
    timeline.seconds[span.role][what] += timeline.learning_of(span.role).overlap_s(span)
    _take_into_window(timeline, span)
    if not span.is_beside:
        bins = timeline.bins[span.role]
        for number, part_s in _parts(timeline.whole, span):
            bins[number]["" if span.is_wait else span.kind] += part_s


def _no_bins() -> list[dict[str, float]]:
    return [defaultdict(float) for _ in range(BINS)]


def _take_into_window(timeline: Timeline, span: FiledSpan) -> None:
    window, place = timeline.window, (span.role, span.kind if span.is_beside else "")
    if window.overlap_s(span):
        short_s = SHORT_SHARE * window.duration_s
        lane = timeline.lanes.setdefault(place, Lane(short_s=short_s, piece_s=float("inf"), most=None))
        begin_s, end_s = max(window.begin_s, span.began_unix_s), min(window.end_s, span.ended_unix_s)
        lane.add(Activity(span.kind, span.whom, span.is_wait), begin_s, end_s)


def _parts(whole: Extent, span: FiledSpan) -> Iterator[tuple[int, float]]:
    """Yield (bin, seconds of the span in this bin)."""
    bin_s = whole.duration_s / BINS
    first, last = ((time_s - whole.begin_s) / bin_s for time_s in (span.began_unix_s, span.ended_unix_s))
    for number in range(min(int(first), BINS - 1), min(int(last), BINS - 1) + 1):
        yield number, (min(last, number + 1) - max(first, number)) * bin_s
