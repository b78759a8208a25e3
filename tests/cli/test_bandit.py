"""`mrl bandit`: the whole study once, and what it refuses."""

import importlib.util
import json
from pathlib import Path

import pytest

from mrl.bandit.study import PICTURES
from mrl.cli.bandit import NUMBERS, _significant, check_folder
from mrl.cli.main import main
from mrl.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.thorough
def test_quick_study_writes_everything(tmp_path: Path, capsys) -> None:
    """Tables, numbers, pictures; files of an earlier study are replaced, and no half file stays."""
    folder = tmp_path / "new" / "bandit"
    folder.mkdir(parents=True)
    (folder / NUMBERS).write_text("old")

    assert main(["bandit", "--quick", "--seed", "3", "--out", str(folder)]) == 0

    shown = capsys.readouterr().out
    for words in ("p 0.0144", "q 0.2694", "SGT", "0.0553", "0.00667", "PRP behaviour", "after 120 steps"):
        assert words in shown
    assert sorted(path.name for path in folder.iterdir()) == sorted((NUMBERS, *PICTURES))
    assert shown.splitlines()[-len(PICTURES) - 1 :] == [str(folder / name) for name in (NUMBERS, *PICTURES)]
    assert all((folder / name).read_bytes().startswith(PNG) for name in PICTURES)
    numbers = json.loads((folder / NUMBERS).read_text())
    assert numbers["seed"] == 3
    assert f"{numbers['methods']['SGT']['support']:.6g}" == "0.0552983"
    assert len(numbers["toy_success_per_step"]["GRPO"]) == 121


def test_a_folder_of_something_else_is_refused_at_once(tmp_path: Path, capsys) -> None:
    """Exit code 2, one line that names the file, nothing written."""
    (tmp_path / "thesis.tex").write_text("x")

    assert main(["bandit", "--out", str(tmp_path)]) == 2

    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "thesis.tex" in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_own_and_hidden_files_are_no_obstacle(tmp_path: Path) -> None:
    """A folder of an earlier study, an empty one and a new one pass; a file does not."""
    ours = (NUMBERS, "plane.png")
    check_folder(tmp_path / "new", ours)
    for name in (*ours, ".DS_Store"):
        (tmp_path / name).write_bytes(b"")
    check_folder(tmp_path, ours)
    (tmp_path / NUMBERS).chmod(0o700)
    for path in (tmp_path / NUMBERS, tmp_path / NUMBERS / "below"):
        with pytest.raises(ConfigError, match="the folder is not writable"):
            check_folder(path, ours)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00759317, "0.00759"), (0.13, "0.130"), (0.0, "0"), (4e-19, "0"), (0.00001234, "1.23e-05"), (123.0, "123")],
)
def test_three_significant_digits(value: float, text: str) -> None:
    """Trailing zeros stay, rounding dust is zero."""
    assert _significant(value) == text


@pytest.mark.parametrize("seed", ["-1", "x"])
def test_a_seed_is_a_whole_number_from_zero(seed: str, capsys) -> None:
    """One line, exit code 2."""
    assert main(["bandit", f"--seed={seed}"]) == 2
    assert f"invalid seed value: '{seed}'" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch, tmp_path: Path, capsys) -> None:
    """The command asks Python's finder, which here knows no matplotlib."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))

    assert main(["bandit", "--out", str(tmp_path / "bandit")]) == 2

    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "matplotlib" in told
    assert "plots" in told
    assert not (tmp_path / "bandit").exists()
