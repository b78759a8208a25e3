#!/usr/bin/env python3
"""Gain of sharing by the chance that a peer can help, for readers of the science programme: a table and a picture.

    .venv/bin/python tools/science_doses.py [FOLDER]      runs/science by default, which holds dose-X of `science.sh`

A rescue happens where all G own answers failed and one of a peer's G' answers did not (arXiv 2605.07244):

    alpha = (1 - p)^G [1 - (1 - q)^G'],   p and q the policies' chances on a task before the first step

Both are taken from the baseline's held-out answers at step 0, over its seeds, and alpha is the mean over tasks and
policies. Writes doses.md and doses.png into FOLDER, and prints the table.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from mrl.bandit.overlap import rescue_probability
from mrl.config.run_folder import read_run_config
from mrl.files import replace_file
from mrl.plots import SOFT, png, quiet_style, sheet
from mrl.report.palette import colour_of

MARKS = "osD^v"
MOST = 1 - 1e-9
"""Largest chance on a task: the logarithm of its complement is taken."""


class Dose(NamedTuple):
    """Results at one dose: one share of rare operations."""

    share: str
    alpha: float
    rows: Mapping[str, Mapping[str, Any]]
    """Rows of `mrl compare`, by regime; the first is the baseline."""

    @property
    def gains(self) -> dict[str, tuple[float, float | None]]:
        """Regime -> gain over the baseline at the end, and half of its 95 % interval; None for one seed."""
        return {name: (row["mean"], row["half"]) for name, row in self._against()}

    def _against(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, row in list(self.rows.items())[1:]:
            yield name.rpartition(":")[2], row["end_against_baseline"]


def alpha_of(runs: Sequence[Path]) -> float:
    """Return alpha of the policies before the first step, as the baseline's runs measured their chances."""
    policies = read_run_config(runs[0]).policies
    chances = {name: _chances(runs, name) for name in policies}
    sizes = {name: table.rollout.group_size for name, table in policies.items()}
    return fmean(
        float(rescue_probability(chances[own][task], chances[peer][task], sizes[own], sizes[peer]))
        for own in policies
        for peer in policies
        for task in chances[own]
        if peer != own
    )


def _chances(runs: Sequence[Path], policy: str) -> dict[str, float]:
    found = [json.loads((run / "evaluation" / f"{policy}-0.json").read_text())["per_task"] for run in runs]
    return {task: min(MOST, fmean(one[task]["accuracy"] for one in found)) for task in found[0]}


def doses_in(folder: Path) -> list[Dose]:
    """Read the doses whose comparison has ended, the rarest first."""
    found = []
    for file in folder.glob("dose-*/comparison.json"):
        rows = json.loads(file.read_text())
        baseline = next(iter(rows))
        runs = sorted(path for path in file.parent.glob(f"{baseline}-*") if re.fullmatch(r".*-\d+", path.name))
        found.append(Dose(file.parent.name.removeprefix("dose-"), alpha_of(runs), rows))
    return sorted(found, key=lambda dose: float(dose.share))


def common(doses: Sequence[Dose]) -> list[str]:
    """Regimes that all doses have."""
    return [name for name in doses[0].gains if all(name in dose.gains for dose in doses)]


def table(doses: Sequence[Dose]) -> str:
    """Return the table in Markdown."""
    names = common(doses)
    lines = [["share", "alpha", "start", "baseline's end", *names], ["---:"] * (4 + len(names))]
    for dose in doses:
        average = next(iter(dose.rows.values()))["average"]
        gains = [_told(*dose.gains[name]) for name in names]
        plain = [f"{average[key]['mean']:.3f}" for key in ("start", "end")]
        lines.append([dose.share, f"{dose.alpha:.2f}", *plain, *gains])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _told(mean: float, half: float | None) -> str:
    return f"{mean:+.3f}" + ("" if half is None else f" [{mean - half:+.3f}, {mean + half:+.3f}]")


def picture(doses: Sequence[Dose]) -> bytes:
    """Draw the gain of each dose in the order of alpha, a line per regime, with paired 95 % intervals."""
    with quiet_style():
        figure = sheet(6.4, 4.2, left=0.8, right=0.2, bottom=0.85)
        axes = figure.subplots()
        axes.axhline(0.0, color=SOFT, lw=1.0)
        ordered = sorted(doses, key=lambda dose: dose.alpha)
        for place, name in enumerate(common(doses)):
            means = [dose.gains[name][0] for dose in ordered]
            halves = [dose.gains[name][1] or 0.0 for dose in ordered]
            shifted = [at + 0.06 * (place - 1) for at in range(len(ordered))]  # intervals beside each other
            colour = colour_of(place + 1).light
            axes.errorbar(
                shifted, means, halves, color=colour, marker=MARKS[place], ms=5, lw=1.6, capsize=3, label=name
            )
        axes.set_xticks(range(len(ordered)), [f"{dose.alpha:.2f}\n({dose.share})" for dose in ordered])
        axes.set_xlabel("predicted chance of a rescue (share of each rare operation)")
        axes.set_ylabel("held-out accuracy beyond the baseline's")
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(MARKS))
        return png(figure)


def main(words: Sequence[str]) -> int:
    """Write the table and the picture. Return 0, or 2 if there is no dose."""
    folder = Path(words[0] if words else "runs/science")
    doses = doses_in(folder)
    if not doses:
        print(
            f"science_doses: no dose-X/comparison.json in {folder}; tools/science.sh dose-0.01 makes one",
            file=sys.stderr,
        )
        return 2
    replace_file(folder / "doses.md", table(doses).encode())
    replace_file(folder / "doses.png", picture(doses))
    print(table(doses), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
