"""Diagram of the flow of experience: policies as boxes, with wider arrows where more records were delivered."""

import math

from mrl.report.charts import Figure
from mrl.report.number_format import count, fixed, percent
from mrl.report.run_data import RunData
from mrl.report.svg import svg, text

BOX_WIDTH, BOX_HEIGHT = 96.0, 40.0
TWO_HEIGHT = 230.0
MAX_LABELLED = 3
"""Most policies for which arrows have text, a short one for three; the table below the diagram has all of it."""

Place = tuple[float, float]


def flow_diagram(data: RunData) -> Figure:
    """Draw policies as boxes, and an arrow from source to receiver in the source's colour, its width by records."""
    title = "Experience between policies"
    flows = {pair: flow for pair, flow in data.flows.items() if set(pair) <= set(data.policies) and flow.get("records")}
    if not flows:
        return Figure(title, "", wide=True)
    width, height, places = _places(data.policies)
    most = max(flow["records"] for flow in flows.values())
    labelled = len(data.policies) <= MAX_LABELLED
    body, labels = [], []
    for (source, receiver), flow in sorted(flows.items(), key=lambda item: -item[1]["records"]):
        thickness = 1.5 + (9 if labelled else 4) * math.sqrt(flow["records"] / most)
        colour = data.policies.index(source)
        ends, bend = (places[source], places[receiver]), 52.0 if labelled else 26.0
        away = 16 + thickness / 2 if len(data.policies) <= 2 else 0.0
        shape, middle = _arrow(*ends, thickness, colour, bend=bend, away=away)
        body.append(shape)
        if labelled:
            labels.append(_label(flow, middle) if len(data.policies) <= 2 else _short_label(flow, middle))
    for index, name in enumerate(data.policies):
        x, y = places[name]
        corner = f'x="{x - BOX_WIDTH / 2:.1f}" y="{y - BOX_HEIGHT / 2:.1f}"'
        body.append(f'<rect class="box c{index}" {corner} width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8"/>')
        body.append(text(x, y + 5, name[:12], anchor="middle", kind=f"name c{index}"))
    drawing = svg("".join(body + labels), width, height, title)
    note = (
        "From source to receiver; the width grows with the records delivered. The percentage is the hit rate: prompts "
        "that the receiver asked for and the source answered. Age counts the source's versions."
    )
    return Figure(title, drawing, note, wide=True)


def _places(names: list[str]) -> tuple[float, float, dict[str, Place]]:
    """Return width, height, and the centre of every box: two boxes in a row, more on an ellipse."""
    if len(names) <= 2:
        return 760, TWO_HEIGHT, {name: (150.0 + 460 * index, TWO_HEIGHT / 2) for index, name in enumerate(names)}
    width, height, reach_x, reach_y = 760.0, 500.0, 290.0, 190.0
    drop = 50.0 if len(names) == 3 else 0.0
    angles = [2 * math.pi * index / len(names) - math.pi / 2 for index in range(len(names))]
    centre = (width / 2, height / 2 + drop)
    return (
        width,
        height,
        {
            name: (centre[0] + reach_x * math.cos(angle), centre[1] + reach_y * math.sin(angle))
            for name, angle in zip(names, angles, strict=True)
        },
    )


def _arrow(start: Place, end: Place, thickness: float, colour: int, *, bend: float, away: float) -> tuple[str, Place]:
    """Return a bent arrow between two boxes, and the place of its label, `away` from its middle on the outer side."""
    across, down = end[0] - start[0], end[1] - start[1]
    length = math.hypot(across, down)
    side = (down / length, -across / length)
    control = ((start[0] + end[0]) / 2 + side[0] * bend * 1.4, (start[1] + end[1]) / 2 + side[1] * bend * 1.4)
    first, tip = _leave(start, control, 4.0), _leave(end, control, 5.0)
    head = 7 + 1.3 * thickness
    aim = math.atan2(tip[1] - control[1], tip[0] - control[0])
    neck = (tip[0] - head * math.cos(aim), tip[1] - head * math.sin(aim))
    wing = head * 0.55
    left = (neck[0] + wing * math.sin(aim), neck[1] - wing * math.cos(aim))
    right = (neck[0] - wing * math.sin(aim), neck[1] + wing * math.cos(aim))
    curve = f"M{_at(first)}Q{_at(control)} {_at(neck)}"
    shape = (
        f'<path class="flow c{colour}" stroke-width="{thickness:.1f}" d="{curve}"/>'
        f'<path class="head c{colour}" d="M{_at(tip)}L{_at(left)}L{_at(right)}Z"/>'
    )
    middle = tuple(0.25 * a + 0.5 * c + 0.25 * b for a, c, b in zip(first, control, tip, strict=True))
    return shape, (middle[0] + side[0] * away, middle[1] + side[1] * away)


def _leave(box: Place, towards: Place, gap: float) -> Place:
    """Return the point, `gap` outside a box, at which the line from its centre to `towards` leaves the box."""
    across, down = towards[0] - box[0], towards[1] - box[1]
    half_x, half_y = BOX_WIDTH / 2 + gap, BOX_HEIGHT / 2 + gap
    share = min(half_x / abs(across) if across else math.inf, half_y / abs(down) if down else math.inf)
    return box[0] + across * share, box[1] + down * share


def _label(flow: dict[str, float], place: Place) -> str:
    first = f"{percent(flow.get('hit_rate'))} hits"
    second = f"{count(flow.get('records'))} records, age {fixed(flow.get('age_versions'), 1)} versions"
    lift = -8.0 if place[1] < TWO_HEIGHT / 2 else 6.0
    top = text(place[0], place[1] + lift, first, anchor="middle", kind="strong")
    return top + text(place[0], place[1] + lift + 15, second, anchor="middle", kind="label")


def _short_label(flow: dict[str, float], place: Place) -> str:
    words = f"{percent(flow.get('hit_rate'))}, age {fixed(flow.get('age_versions'), 1)}"
    return text(place[0], place[1] + 5, words, anchor="middle", kind="strong halo")


def _at(place: Place) -> str:
    return f"{place[0]:.1f} {place[1]:.1f}"
