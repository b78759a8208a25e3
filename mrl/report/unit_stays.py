"""Who had which unit when: the leases of a run as a Gantt picture and two tables, from its `units.jsonl`.

Only runs that lease whole units (`allocation.units`) have that file; its lines are the transitions of every lease.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mrl.metrics.jsonl import parse_line
from mrl.metrics.names import idle_metric
from mrl.report.number_format import MISSING, elapsed, percent
from mrl.report.svg import svg, text
from mrl.report.timeline_data import Extent
from mrl.report.timeline_picture import LEFT, WIDTH, Scale, time_axis

ROW, BAR, AXIS = 22.0, 16.0, 38.0
SERVING, FREE, DEAD = "active", "free", "dead"
NOBODYS = "nobody's"
MAX_MOVES = 20
MAX_BYTES = 64 * 1024 * 1024


class Stay(NamedTuple):
    """A unit in one state of its lease."""

    policy: str
    state: str
    """As `mrl.allocation.unit_leases.UnitState` has them."""
    why: str
    began_s: float
    ended_s: float


class Units(NamedTuple):
    """Every unit's stays, in order of time."""

    stays: dict[str, list[Stay]]
    extent: Extent
    types: dict[str, str]
    """Unit -> its type, as it was told last; empty where that is not known."""


def read_units(path: Path, ends_s: float) -> Units:
    """What became of every unit until `ends_s` (unix time); no units when there is no such file. Raises OSError."""
    turns: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(path):
        turns.setdefault(line["unit"], []).append(line)
    stays = {unit: list(_stays(found, ends_s)) for unit, found in sorted(turns.items())}
    begins_s = min((found[0].began_s for found in stays.values() if found), default=ends_s)
    types = {unit: str(found[-1].get("type", "")) for unit, found in turns.items()}
    return Units(stays, Extent(begins_s, max(ends_s, begins_s)), types)


def units_html(units: Units, policies: Sequence[str], idle: Mapping[str, Sequence[float]]) -> str:
    """Picture and tables; empty text for a run without units. `idle`: shares by the name of a unit's metric."""
    if not units.stays or not units.extent.duration_s > 0:
        return ""
    note = (
        "Full colour: an engine of this policy serves. Pale: it is being started, or ended and proved gone. "
        "Empty: nobody's. Grey: what ran there could not be proved gone. "
        "Idle, in the table: without an answer in flight, whoever's it was."
    )
    return (
        f'<figure class="timeline">{_drawing(units, policies)}<p>{note}</p></figure>'
        f"{_shares_table(units, policies, idle)}{_moves_table(units)}"
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for row in file.read(MAX_BYTES).split(b"\n")[:-1]:  # what follows the last newline is torn or empty
            line = parse_line(row)
            if line is not None and {"unit", "policy", "state", "why", "time_unix_s"} <= line.keys():
                yield line


def _stays(turns: Sequence[dict[str, Any]], ends_s: float) -> Iterator[Stay]:
    ends = [*(float(turn["time_unix_s"]) for turn in turns[1:]), ends_s]
    for turn, ended_s in zip(turns, ends, strict=True):
        began_s = float(turn["time_unix_s"])
        yield Stay(str(turn["policy"]), str(turn["state"]), str(turn["why"]), began_s, max(began_s, ended_s))


def _drawing(units: Units, policies: Sequence[str]) -> str:
    scale, parts = Scale(units.extent), []
    for number, (unit, stays) in enumerate(units.stays.items()):
        y = ROW * number
        parts.append(text(LEFT - 8, y + BAR - 3, unit[-18:], anchor="end", kind="label"))
        parts += [_bar(stay, scale, y, policies) for stay in stays if stay.state != FREE]
    bottom = ROW * len(units.stays)
    parts.append(time_axis(units.extent, units.extent.begin_s, bottom, "time since the first lease (minutes:seconds)"))
    return svg("".join(parts), WIDTH, bottom + AXIS, "who had which unit over time")


def _bar(stay: Stay, scale: Scale, y: float, policies: Sequence[str]) -> str:
    x = scale.x(stay.began_s)
    width = scale.x(stay.ended_s) - x
    colour = f"c{policies.index(stay.policy)}" if stay.policy in policies else ""
    name = "waited" if stay.state == DEAD or not colour else f"{'mark' if stay.state == SERVING else 'area'} {colour}"
    title = f"<title>{escape(stay.policy)} {stay.state} {stay.ended_s - stay.began_s:.1f} s: {escape(stay.why)}</title>"
    return f'<rect class="{name}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{BAR:g}">{title}</rect>'


def _shares_table(units: Units, policies: Sequence[str], idle: Mapping[str, Sequence[float]]) -> str:
    names = [*policies, "moving", NOBODYS]
    rows = []
    for unit, stays in units.stays.items():
        spent = dict.fromkeys(names, 0.0)
        for stay in stays:
            spent[_column(stay, policies)] += stay.ended_s - stay.began_s
        whole_s = sum(spent.values()) or 1.0
        cells = "".join(f'<td class="n">{percent(spent[name] / whole_s)}</td>' for name in names)
        leases = sum(stay.state == "granted" for stay in stays)
        told = idle.get(idle_metric(unit), ())
        mean = percent(sum(told) / len(told)) if told else MISSING
        name = f"<td>{escape(unit)}</td><td>{escape(units.types[unit])}</td>"
        rows.append(f'<tr>{name}{cells}<td class="n">{mean}</td><td class="n">{leases}</td></tr>')
    head = "".join(f'<th class="n">{escape(name)}</th>' for name in (*names, "idle", "leases"))
    return _table(f"<th>unit</th><th>type</th>{head}", rows)


def _column(stay: Stay, policies: Sequence[str]) -> str:
    if stay.state == SERVING and stay.policy in policies:
        return stay.policy
    return NOBODYS if stay.state in (FREE, DEAD) else "moving"


def _moves_table(units: Units) -> str:
    """The newest ends of leases, and why."""
    ends = [
        (stay.began_s, unit, stay)
        for unit, stays in units.stays.items()
        for before, stay in pairwise(stays)
        if before.state in ("granted", SERVING) and stay.state in ("draining", "clearing")
    ]
    if not ends:
        return ""
    rows = [
        f'<tr><td class="n">{elapsed(at_s - units.extent.begin_s)}</td><td>{escape(unit)}</td>'
        f"<td>{escape(stay.policy)}</td><td>{escape(stay.why)}</td></tr>"
        for at_s, unit, stay in sorted(ends)[-MAX_MOVES:]
    ]
    return _table("<th>at</th><th>unit</th><th>taken from</th><th>why</th>", rows)


def _table(head: str, rows: Sequence[str]) -> str:
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="flows">{body}</table></div>'
