"""Made policies are cached by everything that their making depends on."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mrl.config.load import validate
from mrl.config.schema import RunConfig
from mrl.models import warm_start
from mrl.processes.preparation.made_policies import cached_folder, is_made, recipe_of
from mrl.tasks import words
from mrl.tasks.games import maze


def config_of(*, seed: int = 1, steps: int = 3, operation: str = "reverse", pool_seed: int = 17) -> RunConfig:
    make: dict[str, Any] = {"architecture": "llama", "tokenizer": "metaspace", "seed": seed}
    tables = {
        "run": {"name": "r", "steps": steps},
        "tasks": {"copy": {"source": "words", "dataset": "copy", "operation": operation}},
        "pool": {"seed": pool_seed},
        "policies": {"a": {"make": make}, "b": {"make": make}},
    }
    return validate(tables, where="test")


def folder_of(config: RunConfig, name: str = "a") -> Path:
    return cached_folder(recipe_of(config, name), {"MRL_CACHE": "/cache"})


def test_the_folder_changes_with_what_the_making_depends_on_and_with_nothing_else() -> None:
    """Recipe, tasks and pool seed count; the length of the run, the policy's name and the verifiers do not."""
    first = folder_of(config_of())
    assert first.parent == Path("/cache/policies")
    assert folder_of(config_of(steps=9)) == first
    assert folder_of(config_of(), "b") == first
    task = config_of().tasks["copy"].model_copy(update={"verifier": "own:judge", "verifier_timeout_s": 9.0})
    assert folder_of(config_of().model_copy(update={"tasks": {"copy": task}})) == first
    others = [config_of(seed=2), config_of(operation="copy"), config_of(pool_seed=18)]
    assert len({first, *map(folder_of, others)}) == 4


@pytest.mark.parametrize("module", [warm_start, words, maze])
def test_the_folder_changes_with_the_code_that_makes_policies(module: ModuleType, monkeypatch) -> None:
    """Of models, of tasks, and of games."""
    before, read = folder_of(config_of()), Path.read_bytes
    changed = Path(str(module.__file__))
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == changed))
    assert folder_of(config_of()) != before


def test_the_cache_lies_in_the_home_folder_unless_told_otherwise() -> None:
    """MRL_CACHE wins; an empty one counts as none."""
    recipe = recipe_of(config_of(), "a")
    assert cached_folder(recipe, {"MRL_CACHE": ""}).is_relative_to(Path.home() / ".cache" / "mrl" / "policies")


def test_a_folder_without_a_model_counts_as_not_made(tmp_path: Path) -> None:
    """Only a complete policy is reused."""
    assert not is_made(tmp_path)
    (tmp_path / "config.json").touch()
    assert is_made(tmp_path)
