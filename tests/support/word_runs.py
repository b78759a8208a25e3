"""Configurations of runs on one task of words, for tests that need no more of a run."""

from collections.abc import Mapping
from typing import Any

from mrl.config.load import validate
from mrl.config.schema import RunConfig


def word_run(
    policies: Mapping[str, Mapping[str, Any]],
    *,
    task: str = "copy",
    run: Mapping[str, Any] | None = None,
    **tables: Any,
) -> RunConfig:
    """Make the configuration of a run of three steps; a policy that names no model and no recipe has the model "m"."""
    models = {name: table if "make" in table else {"model": "m", **table} for name, table in policies.items()}
    base = {
        "run": {"name": "r", "steps": 3, **(run or {})},
        "tasks": {task: {"source": "words", "dataset": task}},
        "policies": models,
    }
    return validate(base | tables, where="test")
