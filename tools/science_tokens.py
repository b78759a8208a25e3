#!/usr/bin/env python3
"""Sharing beside training alone for as many tokens, for readers of the science programme: its setting `tokens`.

    .venv/bin/python tools/science_tokens.py [FOLDER] [--seeds 10] [--steps 80] [--key.path VALUE ...]

A regime that imitates peers trains more tokens in a step. So the quickstart is trained with `independent`, `sgt` and
`sgt-reported` for equal steps, and with `independent` once more for more steps: so many that, at the tokens per step of
its first run, it trains the tokens of the other regime that trains more. It trains fewer where later groups succeed as
a whole, which the table says. The learning rate falls to its end over each run's own steps. Each seed makes policies of
its own, the same for all rows. Finished runs are kept, so that the same command goes on; tokens.md is the table.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from mrl.cli.main import main as mrl
from mrl.files import replace_file
from mrl.report.comparison import Comparison, holm, read_outcome

ALONE, LONGER = "independent", "independent, longer"
SHARING = ("sgt", "sgt-reported")
RATE = 4e-4
"""Learning rate that tuning chose for both `independent` and `sgt`."""


def train(folder: Path, regimes: Sequence[str], seed: int, steps: int, overrides: Sequence[str]) -> None:
    """Run the missing regimes of one seed. Raises SystemExit with the code of a command that failed."""
    words = ["compare", "quickstart", "--regimes", ",".join(regimes), "--seeds", f"{seed},", "--folder", str(folder)]
    words += ["--run.steps", str(steps), "--evaluation.every", "0"]
    for name in ("qwen", "llama"):
        words += [f"--policies.{name}.make.seed", str(seed), f"--policies.{name}.learner.lr", str(RATE)]
    if code := mrl([*words, *overrides]):
        sys.exit(code)


def comparison_in(folders: dict[str, Path], seeds: Sequence[int], *, baseline: str) -> Comparison:
    """Compare finished runs; `folders`: row -> prefix of its folders, which a seed ends."""
    outcomes = {
        row: {seed: read_outcome(path.with_name(f"{path.name}-{seed}")) for seed in seeds}
        for row, path in folders.items()
    }
    return Comparison(outcomes, baseline)


def steps_for_equal_tokens(comparison: Comparison, steps: int) -> int:
    """Return steps in which the baseline trains as many tokens as every other row, at its tokens per step so far."""
    trained = {row: comparison.spent(row, "trained_tokens") for row in comparison.regimes}
    return math.ceil(steps * max(trained.values()) / trained[comparison.baseline])


def table(comparison: Comparison) -> str:
    """Return the table in Markdown: each row's end, and its gain over the baseline, paired by seed."""
    adjusted = holm(comparison.p_values())
    lines = [
        ["", "end", f"end minus {comparison.baseline}", "p (Holm)", "seeds ahead", "own answers", "trained tokens"],
        ["---", *["--:"] * 6],
    ]
    base = comparison.outcomes[comparison.baseline]
    for row in comparison.regimes:
        end, outcomes = comparison.over_seeds(row, "end"), comparison.outcomes[row]
        gain, ahead, p = "", "", ""
        if row != comparison.baseline:
            found = comparison.against_baseline(row, "end")
            gain = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
            ahead = f"{sum(one.end() > base[seed].end() for seed, one in outcomes.items())} of {len(outcomes)}"
            p = f"{adjusted[row]:.2g}"
        spent = (f"{comparison.spent(row, name):,.0f}" for name in ("own_answers", "trained_tokens"))
        lines.append([row, f"{end.mean:.3f} ± {end.half:.3f}", gain, p, ahead, *spent])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(words: Sequence[str]) -> int:
    """Train the missing runs, and write tokens.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/science/tokens"))
    parser.add_argument("--seeds", type=int, default=10, help="of which each makes its own policies")
    parser.add_argument("--steps", type=int, default=80, help="of all rows but the longer one")
    arguments, overrides = parser.parse_known_args(words)
    seeds, rows = range(1, arguments.seeds + 1), (ALONE, *SHARING)
    for seed in seeds:
        train(arguments.folder / "steps", rows, seed, arguments.steps, overrides)
    folders = {row: arguments.folder / "steps" / row for row in rows}
    longer = steps_for_equal_tokens(comparison_in(folders, seeds, baseline=ALONE), arguments.steps)
    for seed in seeds:
        train(arguments.folder / "longer", (ALONE,), seed, longer, overrides)
    folders[LONGER] = arguments.folder / "longer" / ALONE
    told = "\n".join(table(comparison_in(folders, seeds, baseline=base)) for base in (LONGER, ALONE))
    told = f"{arguments.steps} steps, and {longer} of the longer row.\n\n{told}"
    replace_file(arguments.folder / "tokens.md", told.encode())
    print(told, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
