"""Timeline of a run as a drawing and a table: a row per role, time to the right, waits in grey."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from mrl.metrics.time_spans import EndedSpan
from mrl.report.number_format import elapsed, percent
from mrl.report.palette import KINDS, OTHER_KIND
from mrl.report.svg import svg, text
from mrl.report.timeline_data import Extent, Share, Timeline

WIDTH, LEFT, RIGHT = 1100.0, 122.0, 12.0
OVERVIEW_ROW, OVERVIEW_BAR = 14.0, 11.0
BAR, BESIDE, GAP, STEP_ROOM, AXIS = 24.0, 8.0, 9.0, 15.0, 38.0
KEY_ROW = 20.0
CHAR_WIDTH = 6.6
MAX_ROLES = 24
MIN_SHARE = 0.005
NOT_DRAWN = ("idle",)
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400, 604_800)
MAX_TICKS = 14


class LaneRow(NamedTuple):
    """Row of one role in the drawing: its top `y`, and the kinds of activity of other threads, in thin lanes below."""

    role: str
    y: float
    beside: list[str]


def timeline_html(timeline: Timeline, policies: Sequence[str]) -> str:
    """Return drawing and table as HTML; empty text for a run without a timeline."""
    every = timeline.roles(policies)
    roles = every[:MAX_ROLES]
    if not roles or not timeline.window.duration_s > 0:
        return ""
    begin, end = (elapsed(time_s - timeline.whole.begin_s) for time_s in timeline.window)
    note = (
        f"Above: activities of every role over the whole run; the frame marks the part that is shown below, {begin} to "
        f"{end}. Grey: waiting, and for what. Thin bars: activities of a role's other threads at the same time. "
        "Marks on a learner: the end of a step, with its number."
    )
    if timeline.every_minutes > 1:
        note += f" The run was long, so only every {timeline.every_minutes}th minute was kept."
    if len(every) > len(roles):
        note += f" {len(every) - len(roles)} more roles are not shown."
    return (
        f'<figure class="timeline">{timeline_drawing(timeline, roles, policies)}<p>{escape(note)}</p></figure>'
        f"{shares_table(timeline, roles, policies)}"
    )


def timeline_drawing(timeline: Timeline, roles: Sequence[str], policies: Sequence[str]) -> str:
    """Draw the whole run in thin strips, and the window below them."""
    top = OVERVIEW_ROW * len(roles) + AXIS
    places, bottom = _places(timeline, roles, top)
    key, key_height = _key(_kinds(timeline, roles), bottom + AXIS + 14)
    body = [
        _overview(timeline, roles),
        *(_row(timeline, place, policies) for place in places),
        time_axis(timeline.window, timeline.whole.begin_s, bottom, "time since the start of the run (minutes:seconds)"),
        key,
    ]
    return svg("".join(body), WIDTH, bottom + AXIS + key_height, "what every role did and waited for over time")


def shares_table(timeline: Timeline, roles: Sequence[str], policies: Sequence[str]) -> str:
    """Return a table of every role's activities and waits, as shares of the time in which its policy learned."""
    rows = []
    for role in roles:
        whole_s = timeline.learning_of(role).duration_s
        found = {what: seconds / whole_s for what, seconds in timeline.seconds[role].items()}
        lists = ({what: share for what, share in found.items() if _column(what) == column} for column in range(3))
        cells = "".join(f"<td>{_shares(part)}</td>" for part in lists)
        rows.append(f"<tr><td>{_name(role, policies)}</td>{cells}</tr>")
    head = (
        "<thead><tr><th>role</th><th>did</th><th>waited for</th><th>in other threads at the same time</th></tr></thead>"
    )
    note = (
        "Shares of the time from the end of the first learner step to the end of the last one, of the role's policy; "
        "of any policy if the role has none."
    )
    return (
        f'<div class="scroll"><table class="flows">{head}<tbody>{"".join(rows)}</tbody></table></div>'
        f'<p class="note">{note}</p>'
    )


def _column(what: Share) -> int:
    return 2 if what.is_beside else int(what.is_wait)


def _shares(found: dict[Share, float]) -> str:
    order = sorted((item for item in found.items() if item[1] >= MIN_SHARE), key=lambda item: -item[1])
    return ", ".join(f"{percent(share)} {escape(_waited(what.kind, what.whom))}" for what, share in order)


def _waited(kind: str, whom: str) -> str:
    what = kind.removeprefix("awaiting ")
    return f"{what} ({whom})" if whom else what


def _name(role: str, policies: Sequence[str]) -> str:
    return f'<span class="{_colour(role, policies).replace("name", "policy")}">{escape(role)}</span>'


def _colour(role: str, policies: Sequence[str]) -> str:
    policy = role.partition("/")[2].partition("/")[0]
    return f"name c{policies.index(policy)}" if policy in policies else "label"


def _places(timeline: Timeline, roles: Sequence[str], top: float) -> tuple[list[LaneRow], float]:
    places, y = [], top
    for role in roles:
        beside = sorted(kind for owner, kind in timeline.lanes if owner == role and kind)
        place = LaneRow(role, y + (STEP_ROOM if role.startswith("learner/") else 0.0), beside)
        places.append(place)
        y = place.y + BAR + BESIDE * len(beside) + GAP
    return places, y


def _kinds(timeline: Timeline, roles: Sequence[str]) -> list[str]:
    """Kinds of activity that are drawn, first the kinds with a colour of their own."""
    own = {kind for role in roles for found in timeline.bins.get(role, ()) for kind in found}
    found = (own | {kind for role, kind in timeline.lanes if role in roles}) - {"", *NOT_DRAWN}
    return [kind for kind in KINDS if kind in found] + sorted(found - set(KINDS))


def _class(kind: str) -> str:
    return f"t{KINDS.index(kind) if kind in KINDS else OTHER_KIND}"


def _overview(timeline: Timeline, roles: Sequence[str]) -> str:
    parts = []
    for number, role in enumerate(roles):
        y = OVERVIEW_ROW * number
        parts.append(text(LEFT - 8, y + 10, role[:20], anchor="end", kind="tick"))
        parts.append(_strips(timeline.bins.get(role, []), timeline.whole.duration_s, y + OVERVIEW_BAR))
    bottom = OVERVIEW_ROW * len(roles)
    x, end = (x_of(time_s, timeline.whole) for time_s in timeline.window)
    parts.append(
        f'<rect class="frame" x="{x:.1f}" y="-2" width="{max(2.0, end - x):.1f}" height="{bottom + 2:.1f}" rx="2"/>'
    )
    parts.append(time_axis(timeline.whole, timeline.whole.begin_s, bottom, ""))
    return "".join(parts)


def _strips(bins: Sequence[dict[str, float]], whole_s: float, floor: float) -> str:
    """Draw the shares of every bin, stacked, waits on top; one path per kind."""
    width, paths = (WIDTH - LEFT - RIGHT) / max(1, len(bins)), dict[str, list[str]]()
    for number, found in enumerate(bins):
        y = floor
        order = sorted(found, key=lambda kind: (kind == "", _class(kind), kind))
        for kind in order:
            height = OVERVIEW_BAR * min(1.0, found[kind] * len(bins) / whole_s)
            y -= height
            if height >= 0.05 and kind not in NOT_DRAWN:
                shape = f"M{LEFT + number * width:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"
                paths.setdefault(f"did {_class(kind)}" if kind else "waited", []).append(shape)
    return "".join(f'<path class="{name}" d="{"".join(shapes)}"/>' for name, shapes in sorted(paths.items()))


def _row(timeline: Timeline, place: LaneRow, policies: Sequence[str]) -> str:
    label = text(LEFT - 8, place.y + 16, place.role[:18], anchor="end", kind=_colour(place.role, policies))
    parts = [label]
    for number, kind in enumerate(["", *place.beside]):
        lane = timeline.lanes.get((place.role, kind))
        y = place.y if not number else place.y + BAR + 1 + BESIDE * (number - 1)
        parts += [_span(one, timeline.window, y, BESIDE - 1 if number else BAR) for one in (lane.ended if lane else ())]
    if place.role.startswith("learner/"):
        ends = timeline.step_ends.get(place.role.partition("/")[2], ())
        parts.append(_steps(ends, timeline.window, place.y))
    return "".join(parts)


def _span(span: EndedSpan, window: Extent, y: float, height: float) -> str:
    kind, whom, is_wait = span.activity
    if kind in NOT_DRAWN:
        return ""
    x = x_of(span.began_s, window)
    width = x_of(span.ended_s, window) - x
    name = "waited" if is_wait else f"did {_class(kind)}"
    title = f"<title>{escape(_waited(kind, whom))} {span.duration_s:.2f} s</title>" if width >= 1 else ""
    shape = f'<rect class="{name}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:g}">{title}</rect>'
    return shape + (_inside(x, y, width, kind.removeprefix("awaiting "), whom) if is_wait else "")


def _inside(x: float, y: float, width: float, what: str, whom: str) -> str:
    """Label of a wait: the thing awaited, and the role awaited where there is room; empty where nothing fits."""
    for words in (f"{what}, {whom}", what) if whom else (what,):
        if len(words) * CHAR_WIDTH + 6 <= width:
            return text(x + width / 2, y + 16, words, anchor="middle", kind="tick")
    return ""


def _steps(ends: Sequence[tuple[float, float]], window: Extent, y: float) -> str:
    parts, free_x = [], -math.inf
    for time_s, step in ends:
        if not window.begin_s <= time_s <= window.end_s:
            continue
        x, words = x_of(time_s, window), f"{step:g}"
        parts.append(f'<line class="step" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4:.1f}" y2="{y + BAR + 2:.1f}"/>')
        if x >= free_x:
            parts.append(text(x, y - 6, words, anchor="middle", kind="tick"))
            free_x = x + (len(words) + 1) * CHAR_WIDTH
    return "".join(parts)


def x_of(time_s: float, extent: Extent) -> float:
    """Return the horizontal place of a unix time in a drawing of a stretch of time."""
    share = (time_s - extent.begin_s) / extent.duration_s
    return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)


def time_axis(extent: Extent, zero_s: float, y: float, label: str) -> str:
    """Draw an axis with ticks of the time since `zero_s`."""
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>']
    step_s = next((step for step in TICKS_S if extent.duration_s / step <= MAX_TICKS), TICKS_S[-1])
    first, last = math.ceil((extent.begin_s - zero_s) / step_s), math.floor((extent.end_s - zero_s) / step_s)
    for number in range(first, last + 1):
        x = x_of(zero_s + number * step_s, extent)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}"/>')
        parts.append(text(x, y + 16, elapsed(number * step_s), anchor="middle", kind="tick"))
    if label:
        parts.append(text((LEFT + WIDTH - RIGHT) / 2, y + 33, label, anchor="middle", kind="label"))
    return "".join(parts)


def _key(kinds: Sequence[str], y: float) -> tuple[str, float]:
    """Return the legend and its height."""
    own, others = [kind for kind in kinds if kind in KINDS], [kind for kind in kinds if kind not in KINDS]
    entries = [(kind, f"did {_class(kind)}") for kind in own] + [("waiting", "waited")]
    if others:
        entries.append((", ".join(others), f"did t{OTHER_KIND}"))
    parts, x, top = [], LEFT, y
    for words, name in entries:
        width = 19 + (len(words) + 3) * CHAR_WIDTH
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + KEY_ROW
        parts.append(f'<rect class="{name}" x="{x:.1f}" y="{y - 10:.1f}" width="14" height="12"/>')
        parts.append(text(x + 19, y, words, kind="label"))
        x += width
    return "".join(parts), y - top + KEY_ROW
