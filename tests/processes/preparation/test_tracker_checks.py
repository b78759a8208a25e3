"""Mistakes with trackers: one line each, before anything is started."""

import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import validate
from mrl.config.schema import TrackerTable
from mrl.errors import ConfigError, MissingError
from mrl.metrics.trackers.kinds import TRACKERS
from mrl.processes.preparation.tracker_checks import check_tracker


def table(kind: str, **options: Any) -> TrackerTable:
    return TrackerTable(kind=kind, options=options)  # type: ignore[arg-type]


def missing(one: TrackerTable) -> list[str]:
    """What is told to be missing."""
    found: list[MissingError] = []
    check_tracker(one, found.append, where="c.toml", key="trackers.0")
    return [str(error) for error in found]


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (table("tensorboard", flush=3), "got 'flush'; wanted no options"),
        (
            table("wandb", tags=["a", 1]),
            "trackers.0.options.tags: invalid value; got ['a', 1]; wanted a list of strings",
        ),
    ],
)
def test_a_wrong_option_is_refused(one: TrackerTable, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        missing(one)
    assert told in str(caught.value)


@pytest.mark.parametrize("kind", TRACKERS)
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_missing_package_is_told_with_its_command(
    kind: str, is_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of its name in the current one, as wandb makes it, is not the package."""
    spec = importlib.machinery.ModuleSpec(kind, None, is_package=True) if is_folder else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert missing(table(kind)) == [
        f"trackers.0.kind: the package {kind} is not installed; cure: pip install 'mrl[{kind}]'"
    ]


def there(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """All packages are there, and nobody is logged in."""
    spec = importlib.machinery.ModuleSpec("any", None, origin="any.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_BASE_URL",
        "TRACKIO_SPACE_ID",
        "SWANLAB_API_KEY",
        "SWANLAB_MODE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(home / "netrc"))


def test_wandb_online_needs_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A key in the environment or in the user's netrc, for the host in use; offline none."""
    there(monkeypatch, tmp_path)
    cure = 'not logged in to wandb; cure: run `wandb login`, or set WANDB_MODE=offline or options.mode = "offline"'
    assert missing(table("wandb")) == [f"trackers.0.kind: {cure}"]
    assert missing(table("wandb", mode="offline")) == []

    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    assert missing(table("wandb")) == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert len(missing(table("wandb"))) == 1


def test_swanlab_online_needs_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A key in the environment, or where its login keeps it; offline none."""
    there(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "root"))
    cure = (
        'not logged in to swanlab; cure: run `swanlab login`, or set SWANLAB_MODE=offline or options.mode = "offline"'
    )
    assert missing(table("swanlab")) == [f"trackers.0.kind: {cure}"]
    assert missing(table("swanlab", mode="cloud")) == [f"trackers.0.kind: {cure}"]
    assert missing(table("swanlab", mode="offline")) == []

    (tmp_path / "root").mkdir()
    (tmp_path / "root/.netrc").write_text("machine https://api.swanlab.cn login user password 0123\n")
    assert missing(table("swanlab")) == []
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "elsewhere"))
    assert len(missing(table("swanlab"))) == 1
    monkeypatch.setenv("SWANLAB_API_KEY", "0123")
    assert missing(table("swanlab")) == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert missing(table("wandb")) == []


@pytest.mark.parametrize(
    ("trackers", "told"),
    [
        ([{"kind": "wan db"}], "trackers.0.kind: invalid value; got 'wan db'"),
        ([{}], "trackers.0.kind: missing"),
    ],
)
def test_a_wrong_table_is_told_by_its_place(trackers: Any, told: str) -> None:
    tables = {
        "run": {"name": "r", "steps": 3},
        "tasks": {"copy": {"source": "words", "dataset": "copy"}},
        "policies": {"a": {"model": "m"}},
        "trackers": trackers,
    }
    with pytest.raises(ConfigError) as caught:
        validate(tables, where="c.toml")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
