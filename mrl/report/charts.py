"""Charts of a report, each with a note on how to read it. A chart without data says that nothing was recorded."""

import math
from html import escape
from typing import NamedTuple

from mrl.report.run_data import Points, RunData
from mrl.report.svg import RIGHT, WIDTH, Axes, Frame, Line, grid, line_chart, moving_mean, svg, text


class Figure(NamedTuple):
    """A title, a drawing, and a sentence on how to read it."""

    title: str
    drawing: str
    note: str = ""
    wide: bool = False


EMPTY = "No data was recorded."
STEP = "learner step"


def accuracy(data: RunData) -> Figure:
    """Draw held-out accuracy over all tasks."""
    lines = [Line(name, index, data.accuracies(name), marks=True) for index, name in enumerate(data.policies)]
    drawing = line_chart(lines, Axes(STEP, "accuracy (share of prompts)", 0.0, 1.0))
    return Figure("Held-out accuracy", drawing, "All tasks together; prompts that were never trained on.")


def accuracy_of_tasks(data: RunData) -> list[Figure]:
    """Draw one small chart of held-out accuracy per task."""
    known = {task for by_task in data.accuracy.values() for task in by_task if task}
    tasks = [task for task in data.tasks if task in known] + sorted(known - set(data.tasks))
    figures = []
    for task in tasks:
        lines = [Line(name, index, data.accuracies(name, task), marks=True) for index, name in enumerate(data.policies)]
        drawing = line_chart(lines, Axes(STEP, "accuracy (share)", 0.0, 1.0, width=400, height=230))
        if drawing:
            figures.append(Figure(task, drawing))
    return figures


def reward(data: RunData) -> Figure:
    """Draw the mean training reward."""
    lines, window = _smooth(data, "reward/mean")
    values = [y for line in lines for _, y in line.raw if math.isfinite(y)]
    bounds = (0.0, 1.0) if values and min(values) >= 0 and max(values) <= 1 else (None, None)
    return Figure("Training reward", line_chart(lines, Axes(STEP, "mean reward", *bounds)), _smoothed(window))


LEARNING = (
    ("Loss", "loss/total", "loss (nats)", None, "Sum of all loss components."),
    ("Uncertainty of the policy", "entropy/sampled_nats", "-log p (nats)", 0.0, "Mean over own tokens; near 0 the"
     " policy no longer explores."),
    ("Gradient norm", "optim/grad_norm", "norm before clipping", 0.0, "Persistent peaks suggest too large steps."),
    ("Clipped tokens", "ratio/clip_share", "share of own tokens", 0.0, "Tokens whose gradient is removed by clipping."),
    ("Length of answers", "tokens/answer_mean", "tokens", 0.0, "Answers are cut off at max_new_tokens."),
    ("Learning rate", "optim/lr", "learning rate", 0.0, ""),
)  # fmt: skip
"""Numbers that tell whether learning is sound: title, metric, label of y, lowest y (None: by the data), note."""


def learning(data: RunData) -> list[Figure]:
    """Draw one small chart for each number of `LEARNING`."""
    figures = []
    for title, metric, axis, lowest, note in LEARNING:
        lines, window = _smooth(data, metric)
        drawing = line_chart(lines, Axes(STEP, axis, lowest, width=400, height=230))
        if drawing:
            figures.append(Figure(title, drawing, " ".join(part for part in (note, _smoothed(window)) if part)))
    return figures


def rescues(data: RunData) -> Figure:
    """Draw the peer successes trained on per step."""
    lines, window = _smooth(data, "sharing/rescues")
    drawing = line_chart(lines, Axes(STEP, "rescues per step", 0.0))
    return Figure("Rescues per step", drawing, "Peer successes trained on. " + _smoothed(window))


def rescued_share(data: RunData) -> Figure:
    """Draw the share of asked prompts, on which the own group failed, that a peer answered, since the start."""
    lines = [Line(name, index, _cumulative_share(data, name)) for index, name in enumerate(data.policies)]
    drawing = line_chart(lines, Axes(STEP, "rescued (share of asked prompts)", 0.0, 1.0))
    note = "Of the prompts on which every own answer failed, the share with a peer's success, since the start."
    return Figure("All-failed groups that were rescued", drawing, note)


def staleness(data: RunData) -> Figure:
    """Draw the staleness of own rows: mean and maximum of each batch."""
    lines, window = _smooth(data, "staleness/mean_versions")
    for index, name in enumerate(data.policies):
        highest = data.series(name, "staleness/max_versions")
        lines.append(Line("", index, moving_mean(highest, window_of(highest)), dashed=True))
    drawing = line_chart(lines, Axes(STEP, "staleness (versions)", 0.0))
    note = "Solid: mean of the batch. Dashed: maximum of the batch."
    if window > 1:
        note += f" Dots: means of single steps; lines are means over {window} steps."
    return Figure("Staleness of own answers", drawing, note)


def time_split(data: RunData) -> Figure:
    """Draw the mean time of a step by its parts, one bar per policy."""
    rows = [(name, index, split) for index, name in enumerate(data.policies) if (split := _mean_times(data, name))]
    if not rows:
        return Figure("Time of a step", "")
    longest = max(sum(split.values()) for _, _, split in rows) or 1.0
    height = 42 * len(rows) + 50
    scale = (WIDTH - 80 - 70) / longest
    body = []
    for row, (name, index, split) in enumerate(rows):
        y, x = 12 + 42 * row, 80.0
        body.append(text(72, y + 18, name[:10], anchor="end", kind=f"name c{index}"))
        for part, duration_s in split.items():
            width = duration_s * scale
            title = f"<title>{part} {duration_s:.2f} s</title>"
            body.append(
                f'<rect class="c{index} {part}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="26">{title}</rect>'
            )
            if width > 60:
                body.append(text(x + width / 2, y + 17, f"{part} {duration_s:.2f}", anchor="middle", kind=f"in-{part}"))
            x += width
        body.append(text(x + 8, y + 18, f"{sum(split.values()):.2f} s", kind="tick"))
    body.append(_split_key(height - 14))
    note = "Mean seconds of a learner step over the whole run."
    return Figure("Where the time of a step goes", svg("".join(body), WIDTH, height, "seconds per step by part"), note)


def waiting(data: RunData) -> Figure:
    """Draw the time that each step waited for own groups."""
    lines, window = _smooth(data, "time/wait_for_groups_s")
    drawing = line_chart(lines, Axes(STEP, "waiting for own groups (s)", 0.0))
    return Figure("Waiting for own groups", drawing, _smoothed(window))


def allocation(data: RunData) -> Figure:
    """Draw the policies' rollout slots or units over time, stacked."""
    title = f"Rollout {data.capacity_kind} of every policy"
    times = sorted({x for points in data.capacity.values() for x, _ in points})
    names = [name for name in data.policies if data.capacity.get(name)]
    if not times or not names:
        return Figure(title, "")
    columns = {name: _hold(data.capacity[name], times) for name in names}
    total = max(sum(columns[name][place] for name in names) for place in range(len(times))) or 1.0
    end = times[-1] if len(times) > 1 else times[0] + 1
    frame = Frame(times[0], end, 0.0, total * 1.02)
    edges = [*times[1:], end]
    floor = [0.0] * len(times)
    body = [grid(frame, Axes("minutes since the start", data.capacity_kind, whole_x=False))]
    for name in names:
        index = data.policies.index(name)
        ceiling = [low + high for low, high in zip(floor, columns[name], strict=True)]
        body.append(f'<path class="area c{index}" d="{_area(times, edges, floor, ceiling, frame)}"/>')
        middle = (floor[-1] + ceiling[-1]) / 2
        body.append(
            text(WIDTH - RIGHT + 10, frame.y(middle) + 4, f"{name[:9]} {columns[name][-1]:g}", kind=f"name c{index}")
        )
        floor = ceiling
    what = (
        "Units that each policy owns" if data.capacity_kind == "units" else "Requests that each policy may run at once"
    )
    note = f"{what}, stacked; the number is the last share."
    return Figure(title, svg("".join(body), WIDTH, frame.height, title), note)


def figure_html(figure: Figure) -> str:
    """Return the figure as HTML."""
    drawing = figure.drawing or f'<p class="empty">{EMPTY}</p>'
    note = f"<p>{escape(figure.note)}</p>" if figure.note and figure.drawing else ""
    kind = ' class="wide"' if figure.wide else ""
    return f"<figure{kind}><figcaption>{escape(figure.title)}</figcaption>{drawing}{note}</figure>"


def window_of(points: Points) -> int:
    """Return the number of steps over which the mean of a series is drawn; 1 for a short series."""
    return max(5, len(points) // 20) | 1 if len(points) >= 10 else 1


def _smooth(data: RunData, metric: str) -> tuple[list[Line], int]:
    lines, widest = [], 1
    for index, name in enumerate(data.policies):
        raw = data.series(name, metric)
        widest = max(widest, window_of(raw))
        lines.append(Line(name, index, moving_mean(raw, window_of(raw)), raw))
    return lines, widest


def _smoothed(window: int) -> str:
    return f"Dots: single steps. Line: mean over {window} steps." if window > 1 else ""


def _cumulative_share(data: RunData, policy: str) -> Points:
    asked = hits = 0.0
    points: Points = []
    by_step = data.steps.get(policy, {})
    for step in sorted(by_step):
        values = by_step[step]
        asked += _finite(values.get("sharing/asked_prompts"))
        hits += _finite(values.get("sharing/hit_prompts"))
        if asked > 0:
            points.append((float(step), min(1.0, hits / asked)))
    return points


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _mean_times(data: RunData, policy: str) -> dict[str, float]:
    def mean(metric: str) -> float:
        values = [y for _, y in data.series(policy, metric) if math.isfinite(y)]
        return sum(values) / len(values) if values else 0.0

    split = {part: mean(metric) for part, metric in _PARTS}
    split["other"] = max(0.0, mean("time/step_s") - sum(split.values()))
    return split if sum(split.values()) > 0 else {}


_PARTS = (
    ("wait", "time/wait_for_groups_s"),
    ("peers", "time/wait_for_peers_s"),
    ("form", "time/form_s"),
    ("train", "time/train_s"),
    ("publish", "time/publish_s"),
    ("save", "time/checkpoint_s"),
)
"""(part, metric of its duration) for the parts of a step, which follow one another."""


def _split_key(y: float) -> str:
    parts, x = [], 8.0
    for part in (*(name for name, _ in _PARTS), "other"):
        parts.append(f'<rect class="key {part}" x="{x}" y="{y - 10}" width="14" height="12"/>')
        parts.append(text(x + 20, y, part, kind="label"))
        x += 74
    return "".join(parts)


def _hold(points: Points, times: list[float]) -> list[float]:
    """Return the last known value at every time; 0 before the first value."""
    held, place, column = 0.0, 0, []
    for time in times:
        while place < len(points) and points[place][0] <= time:
            held, place = _finite(points[place][1]), place + 1
        column.append(held)
    return column


def _area(times: list[float], edges: list[float], floor: list[float], ceiling: list[float], frame: Frame) -> str:
    top = "".join(
        f"L{frame.x(t):.1f} {frame.y(c):.1f}H{frame.x(e):.1f}" for t, e, c in zip(times, edges, ceiling, strict=True)
    )
    back = list(zip(times, edges, floor, strict=True))[::-1]
    under = "".join(f"L{frame.x(e):.1f} {frame.y(f):.1f}H{frame.x(t):.1f}" for t, e, f in back)
    return "M" + top[1:] + under + "Z"
