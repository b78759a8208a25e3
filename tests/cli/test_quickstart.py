"""`mrl quickstart`: which run it is, and what it says at its end."""

import argparse
import sys
from pathlib import Path

import pytest

from mrl.cli import quickstart, train
from mrl.cli.main import COMMANDS, main
from mrl.config.load import load_config
from mrl.config.shipped_configs import config_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trained(tmp_path, monkeypatch) -> list[tuple[str, bool]]:
    """(run folder, whether earlier files go) of every run that would have been trained from an empty folder."""
    runs: list[tuple[str, bool]] = []

    def note(config, *, clean, resume, where):
        runs.append((f"{config.run.folder}/{config.run.name}", clean))
        Path(runs[-1][0]).mkdir(parents=True, exist_ok=True)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", note)
    return runs


def test_every_call_is_a_new_run(trained, capsys) -> None:
    """What is there is kept and said."""
    for _ in range(3):
        assert main(["quickstart"]) == 0

    assert [folder for folder, _ in trained] == ["runs/quickstart", "runs/quickstart-2", "runs/quickstart-3"]
    assert "runs/quickstart exists and is kept; this run is runs/quickstart-3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "folder"),
    [(["--clean"], "runs/quickstart"), (["--resume"], "runs/quickstart"), (["--run.name=mine"], "runs/mine")],
)
def test_a_run_that_is_named_cleared_or_resumed_is_that_one(trained, words, folder) -> None:
    """Twice the same."""
    for _ in range(2):
        assert main(["quickstart", *words]) == 0

    assert [one for one, _ in trained] == [folder, folder]


def test_it_ends_with_commands_that_exist(trained, capsys) -> None:
    """Each with the folder of this run, as this shell can call it."""
    assert main(["quickstart"]) == 0

    lines = [line.split("  ")[1] for line in capsys.readouterr().out.partition("next:")[2].splitlines()[1:]]
    words = [line.removeprefix(quickstart.how_called()).split() for line in lines]
    assert ["inspect", "runs/quickstart"] in words
    assert {first for first, *_ in words} <= {*COMMANDS, "--help"}


def test_it_shows_its_configuration_to_be_changed(capsys, tmp_path) -> None:
    """What is printed is a valid configuration."""
    assert main(["quickstart", "--show"]) == 0

    (tmp_path / "my.toml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "my.toml") == load_config(ROOT / "configs" / "quickstart.toml")


def test_how_it_is_called_can_be_typed(tmp_path, monkeypatch) -> None:
    """By its name where the shell finds it, by its path where it does not."""
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "mrl").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")

    assert quickstart.how_called() == "venv/bin/mrl"
    monkeypatch.setenv("PATH", str(binaries))
    assert quickstart.how_called() == "mrl"


def test_a_file_goes_before_a_shipped_configuration_of_its_name(tmp_path, monkeypatch) -> None:
    """And a path is never taken for a name."""
    monkeypatch.chdir(tmp_path)
    assert config_file("quickstart").name == "quickstart.toml"
    assert config_file("./x/quickstart") == Path("x/quickstart")
    assert config_file("other") == Path("other")

    Path("quickstart").touch()
    assert config_file("quickstart") == Path("quickstart")


def test_commands_that_take_a_configuration_take_a_shipped_one() -> None:
    """By its name."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    assert parser.parse_args(["quickstart"]).config.is_file()
