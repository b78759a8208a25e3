"""A small configuration of two learners and a teacher, and the files that runs of it leave."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from mrl.cli.compare import add_arguments
from mrl.cli.main import split_overrides
from mrl.config.run_folder import dump_config
from mrl.processes.preparation.comparison_plan import PlannedRun

CONFIG = """
[run]
name = "small"
steps = 4
[tasks.trim]
source = "words"
dataset = "trim"
[policies.a]
model = "models/a"
[policies.b]
model = "models/b"
[policies.t]
model = "models/t"
frozen = true
"""

TEACHER = ("--sharing.rlad.teacher", "t")


def arguments(folder: Path, *words: str) -> argparse.Namespace:
    config = folder / "small.toml"
    config.write_text(CONFIG)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    own, overrides = split_overrides(
        words, {"--regimes", "--seeds", "--async", "--jobs", "--only-table", "--tune", "--tune-seeds"}
    )
    found = parser.parse_args([str(config), "--folder", str(folder / "runs"), *own])
    found.overrides = ["--run.steps", "3", *overrides]
    return found


def finish(run: PlannedRun, *, policies: Iterable[str] = ("a", "b"), **changes: object) -> None:
    """Write the files of a run that came to its end."""
    folder = run.folder
    (folder / "evaluation").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dump_config(run.config) | changes))
    for name in policies:
        (folder / "evaluation" / f"{name}-3.json").write_text("{}")
