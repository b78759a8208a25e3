"""What checkpoints take of a disk, told before the run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.schema import RunConfig
from mrl.processes.preparation import checkpoint_room
from mrl.processes.preparation.checkpoint_room import GIB, num_at_once, room_notes
from tests.support.word_runs import word_run

BILLIONS = 8 * 1024**3
"""Parameters; each takes 12 bytes."""


def config_of(folder: Path, *, run: dict[str, Any] | None = None, **learner: Any) -> RunConfig:
    """A run of a large policy and of one that does not learn."""
    return word_run(
        {"a": {"learner": learner}, "t": {"frozen": True}},
        run={"steps": 1000, "folder": str(folder)} | (run or {}),
        sharing={"regime": "rlad", "rlad": {"teacher": "t"}},
    )


def notes(monkeypatch: pytest.MonkeyPatch, config: RunConfig, *, free_gib: int) -> list[str]:
    monkeypatch.setattr(checkpoint_room.shutil, "disk_usage", lambda path: SimpleNamespace(free=free_gib * GIB))
    return list(room_notes(config, {"a": BILLIONS, "t": BILLIONS}))


def test_a_disk_that_is_too_small_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are kept while a third is written: 288 GiB of 8 billion parameters with moments of 32 bits."""
    config = config_of(tmp_path / "not" / "there")
    assert notes(monkeypatch, config, free_gib=288) == []
    (note,) = notes(monkeypatch, config, free_gib=287)
    assert "checkpoints may need up to 288 GiB" in note
    assert "(a 288), but only 287 GiB are free" in note


@pytest.mark.parametrize(
    ("learner", "gib"),
    [
        ({"keep_checkpoints": 1}, 192),
        ({"optimizer_dtype": "bfloat16"}, 192),
        ({"checkpoint_every": 0}, 96),
        ({"lora": {}}, 0),
    ],
)
def test_less_is_wanted_where_less_is_kept(tmp_path: Path, monkeypatch, learner: dict[str, Any], gib: int) -> None:
    """Fewer, smaller, only the last one, or adapters."""
    config = config_of(tmp_path, **learner)
    assert notes(monkeypatch, config, free_gib=gib) == []
    assert gib == 0 or notes(monkeypatch, config, free_gib=gib - 1)


def test_what_is_there_takes_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a resume."""
    config = config_of(tmp_path)
    step = tmp_path / "r" / "checkpoints" / "a" / "step_25"
    step.mkdir(parents=True)
    with (step / "rank_00000.safetensors").open("wb") as file:
        file.truncate(96 * GIB)
    assert notes(monkeypatch, config, free_gib=192) == []
    assert notes(monkeypatch, config, free_gib=191)


def test_policies_in_step_keep_three(tmp_path: Path) -> None:
    """And one that is written."""
    assert num_at_once(config_of(tmp_path, run={"sync": True}), "a") == 4
