"""Task tables that the tests of this room share."""

from pathlib import Path

import pytest

from mrl.config.task_tables import PoolTable, TaskTable


@pytest.fixture
def tables() -> dict[str, TaskTable]:
    """One real data set of reasoning-gym and two generated ones."""
    return {
        "backward": TaskTable(
            source="reasoning_gym",
            dataset="spell_backward",
            options={"min_word_len": 3, "max_word_len": 4},
            operation="reverse",
        ),
        "swap": TaskTable(source="words", dataset="swap", operation="swap"),
        "rotate": TaskTable(source="words", dataset="rotate", operation="rotate"),
    }


@pytest.fixture
def pool_table() -> PoolTable:
    """A small pool whose sizes do not divide by the number of tasks."""
    return PoolTable(train_prompts=31, held_out_prompts=14, seed=5)


@pytest.fixture
def verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifier processes find this checkout: `tests.support.hard_verifiers`, and mrl."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
