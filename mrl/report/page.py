"""`report.html`: one self-contained page about a run, made from the files of its run folder.

The page has no scripts and makes no external requests; a content security policy forbids both. It is light or dark by
the reader's preference.
"""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from mrl.config.run_folder import RunFolder
from mrl.errors import RunFolderError
from mrl.files import replace_file
from mrl.metrics.rollout_files import ENDING
from mrl.report import charts
from mrl.report.console_lines import missed_note, withheld_note
from mrl.report.diagram import flow_diagram
from mrl.report.number_format import count, elapsed, fixed, percent, signed
from mrl.report.page_style import style_sheet
from mrl.report.progress import MissedPeers
from mrl.report.run_data import RunData, read_run
from mrl.report.samples.conversations import RULES
from mrl.report.sharing_cost import cost_table, gap_chart
from mrl.report.tables import (
    accuracy_table,
    config_table,
    estimates_table,
    evaluation_notes,
    flow_table,
    load_table,
    sample_table,
    together_table,
    unjudged_table,
)
from mrl.report.timeline_data import Timeline, run_timeline
from mrl.report.timeline_picture import timeline_html

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the run folder, in place of an earlier one in a single rename, and return its path.

    Raises RunFolderError when the folder is no run or cannot be written; any other file that is missing or damaged is
    named on the page.
    """
    run = RunFolder(run_folder)
    target, data = run.report_html, read_run(run_folder)
    timeline = run_timeline(run.timeline_jsonl, data.step_ends)
    data.problems += timeline.problems
    try:
        replace_file(target, page(data, timeline).encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise RunFolderError(f"the report cannot be written ({error.strerror})", where=str(target)) from error
    return target


def page(data: RunData, timeline: Timeline) -> str:
    """Return the whole page as text."""
    title = f"mrl run {data.name}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet(len(data.policies))}{RULES}</style></head>\n"
        f"<body><main>{_header(data)}{_problems(data)}{_accuracy(data)}{_learning(data)}{_sharing(data)}"
        f"{_machine(data)}{_timeline(data, timeline)}{_answers(data)}"
        f"{_configuration(data)}</main></body></html>\n"
    )


def _header(data: RunData) -> str:
    started = datetime.fromtimestamp(data.started_unix_s, UTC) if data.started_unix_s else None
    regime = str(data.config.get("sharing", {}).get("regime", "independent"))
    facts = [f"sharing: {regime}", f"policies: {', '.join(data.policies)}", f"wall time {elapsed(data.wall_s)}"]
    if started:
        facts.insert(0, f"{started:%Y-%m-%d %H:%M} UTC")
    if data.restarts:
        facts.append(f"restarts: {count(data.restarts)}")
    cards = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in _headlines(data)
    )
    line = escape(" · ".join(facts))
    return f'<header><h1>{escape(data.name)}</h1><p>{line}</p><div class="cards">{cards}</div></header>'


def _headlines(data: RunData) -> list[tuple[str, str]]:
    gains, ends = [], []
    steps, is_over = data.config.get("run", {}).get("steps", "?"), True
    for policy in data.policies:
        points = data.accuracies(policy)
        if len(points) > 1:
            gains.append(points[-1][1] - points[0][1])
            ends.append(points[-1][1])
            is_over = is_over and points[-1][0] == steps
    mean = sum(ends) / len(ends) if ends else None
    gain = sum(gains) / len(gains) if gains else None
    hits = [flow["hit_rate"] for flow in data.flows.values() if "hit_rate" in flow]
    total = sum(values.get("sharing/rescues", 0.0) for by_step in data.steps.values() for values in by_step.values())
    last = max((max(by_step) for by_step in data.steps.values() if by_step), default=0)
    return [
        (fixed(mean), f"held-out accuracy {'at the end' if is_over else 'so far'}, mean over policies"),
        (signed(gain), "gain since the start"),
        (percent(min(hits)) if hits else "-", "peer hit rate, lowest direction"),
        (count(total), "rescues trained on"),
        (f"{last}/{steps}", "steps"),
    ]


def _problems(data: RunData) -> str:
    if not data.problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in data.problems)
    return f'<section class="problems"><h2>Incomplete data</h2><ul>{items}</ul></section>'


def _accuracy(data: RunData) -> str:
    note = "" if any(data.accuracy.values()) else f'<p class="empty">{charts.EMPTY}</p>'
    solved = "".join(
        f"<h3>{title}</h3>{table}"
        for title, table in (
            ("Several answers to each prompt", estimates_table(data)),
            ("What policies solve together", together_table(data)),
        )
        if table
    )
    return _section("Held-out accuracy, start and end", accuracy_table(data) + evaluation_notes(data) + note + solved)


def _learning(data: RunData) -> str:
    figures = [charts.accuracy(data), charts.reward(data)]
    tasks = "".join(charts.figure_html(figure) for figure in charts.accuracy_of_tasks(data))
    small = f'<h3>Held-out accuracy by task</h3><div class="grid small">{tasks}</div>' if tasks else ""
    sound = "".join(charts.figure_html(figure) for figure in charts.learning(data))
    small += f'<h3>Is learning healthy?</h3><div class="grid small">{sound}</div>' if sound else ""
    unjudged = unjudged_table(data)
    failed = f"<h3>Answers on which verifiers failed</h3>{unjudged}" if unjudged else ""
    return _section("Learning", _grid(figures) + small + failed)


def _sharing(data: RunData) -> str:
    figures = [charts.rescues(data), charts.rescued_share(data)]
    costs = cost_table(data)
    figures += [gap_chart(data)] if costs else []
    parts = (charts.figure_html(flow_diagram(data)), flow_table(data), _notes(data), costs, _grid(figures))
    return _section("Learning from each other", "".join(parts))


def _notes(data: RunData) -> str:
    """Notes on right answers kept from peers, and on pairs of policies that missed each other for some time."""
    name = "sharing/withheld_answers"
    totals = {one: sum(steps.get(name, 0.0) for steps in data.steps.get(one, {}).values()) for one in data.policies}
    notes = [withheld_note(policy, total) for policy, total in totals.items()]
    peers, regime = MissedPeers(), str(data.config.get("sharing", {}).get("regime", "independent"))
    for one, by_step in data.steps.items():
        for step in sorted(by_step):
            notes += [missed_note(missed, regime) for missed in peers.take(one, step, by_step[step])]
    return "".join(f'<p class="note">{escape(note)}.</p>' for note in notes if note)


def _machine(data: RunData) -> str:
    figures = [charts.staleness(data), charts.waiting(data), charts.time_split(data), charts.allocation(data)]
    return _section("Pace", _grid(figures) + load_table(data))


def _timeline(data: RunData, timeline: Timeline) -> str:
    body = timeline_html(timeline, data.policies)
    return _section("Who waited for whom", body) if body else ""


def _answers(data: RunData) -> str:
    kinds = (("rescue", "Rescues"), ("rollout", "Own answers"), ("evaluation", "Held-out answers"))
    parts = [f"<h3>{title}</h3>{table}" for kind, title in kinds if (table := sample_table(data, kind))]
    return _section("Answers", "".join(parts) or f'<p class="empty">{charts.EMPTY}</p>')


def _configuration(data: RunData) -> str:
    return _section("Configuration", config_table(data.config))


def _grid(figures: list[charts.Figure]) -> str:
    return f'<div class="grid">{"".join(charts.figure_html(figure) for figure in figures)}</div>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def is_small(folder: RunFolder, *, max_bytes: int, max_files: int) -> bool:
    """Whether the files that a report reads (metrics, timeline, evaluations, samples) stay within both bounds.

    Stops at the first file beyond a bound. A file whose length cannot be read counts as one file of 0 bytes.
    """
    total_bytes = 0
    for number, path in enumerate(_inputs(folder), start=1):
        total_bytes += _size(path)
        if number > max_files or total_bytes > max_bytes:
            return False
    return True


def _inputs(folder: RunFolder) -> Iterator[Path]:
    yield from (path for path in (folder.metrics_jsonl, folder.timeline_jsonl) if path.exists())
    for root in (folder.evaluation, folder.rollouts):
        for parent, _, names in os.walk(root):
            yield from (Path(parent) / name for name in names if not name.endswith(ENDING))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
