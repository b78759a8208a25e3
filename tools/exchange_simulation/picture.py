"""The outcomes as a figure: what grows with what."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from exchange_simulation import settings
from exchange_simulation.trial import Outcome, Setting

BLUE, ORANGE, GREY = "#2a6fbb", "#d9782d", "#8a8a8a"


class Sweep(NamedTuple):
    """One row of panels."""

    title: str
    label: str
    settings: Sequence[Setting]
    size: Callable[[Setting], int]


SWEEPS = (
    Sweep("one daemon, 100 policies", "records/s offered", settings.rates(), lambda one: one.records_per_s),
    Sweep("one daemon, 10,000 records/s", "policies", settings.policies(), lambda one: one.policies),
    Sweep("1,000 policies, 100,000 records/s", "daemons", settings.shards(), lambda one: one.shards),
)


def draw(outcomes: Sequence[Outcome], path: Path) -> bool:
    """Write a PNG with a row of panels per sweep that is among the outcomes; False when there is none."""
    found = {outcome.setting: outcome for outcome in outcomes}
    rows = [(sweep, [found[one] for one in sweep.settings if one in found]) for sweep in SWEEPS]
    rows = [(sweep, of_sweep) for sweep, of_sweep in rows if of_sweep]
    if not rows:
        return False
    figure = Figure(figsize=(11, 0.6 + 2.9 * len(rows)), layout="constrained")
    for panels, (sweep, of_sweep) in zip(figure.subplots(len(rows), 3, squeeze=False), rows, strict=True):
        _draw_row(panels, sweep, of_sweep)
    figure.suptitle("The exchange in simulated time: how late, how much, how old")
    figure.savefig(path, dpi=75)
    return True


def _draw_row(panels: Sequence[Axes], sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
    sizes = [sweep.size(one.setting) for one in outcomes]
    latency, memory, age = panels
    _draw_pair(latency, sizes, [one.latency_ms for one in outcomes], ("p50", "p99"))
    latency.set(yscale="log", ylabel="publish to arrival, ms", title=sweep.title)
    _draw_busy(latency, sizes, [one.busy for one in outcomes])
    _draw_pair(memory, sizes, [one.held_mib for one in outcomes], ("median", "highest"))
    memory.axhline(outcomes[0].budget_mib, color=GREY, linestyle=":", label="budget")
    memory.legend(loc="best")
    memory.set(ylabel="held by a daemon, MiB", ylim=(0, None))
    _draw_pair(age, sizes, [one.age_versions for one in outcomes], ("mean", "p99"))
    age.set(ylabel="age on arrival, versions", ylim=(0, None))
    for panel in panels:
        panel.set_xscale("log")
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
        panel.set_xticks([], minor=True)
        panel.set_xlabel(sweep.label)
        panel.grid(alpha=0.3)


def _draw_pair(
    panel: Axes, sizes: Sequence[int], values: Sequence[tuple[float, float]], names: tuple[str, str]
) -> None:
    for name, color, marker, series in zip(names, (BLUE, ORANGE), "os", zip(*values, strict=True), strict=True):
        panel.plot(sizes, series, marker=marker, color=color, label=name)
    panel.legend(loc="best")


def _draw_busy(panel: Axes, sizes: Sequence[int], busy: Sequence[float]) -> None:
    right = panel.twinx()
    right.plot(sizes, busy, "^--", color=GREY)
    right.set(ylim=(0, 1.1))
    right.set_ylabel("busy share of the busiest", color=GREY)
