"""The README's own models and prompts: what it shows is valid, short, and does what it says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from tests.support.own_example import example, write_example

MOST_LINES = 15


def test_mrl_check_accepts_the_example(
    tmp_path: Path, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is missing once models and prompts are there, and nothing is written."""
    write_example(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "mine.toml"]) == 0
    out = capsys.readouterr().out
    assert "mine.toml is valid" in out
    assert "still needed" not in out
    assert not (tmp_path / "runs").exists()


def test_the_example_is_short_and_its_verifier_accepts_its_reference() -> None:
    """15 lines of TOML, three commands; the verifier takes the reference in an answer and refuses another number."""
    shown = example()
    assert len(shown["mine.toml"].splitlines()) <= MOST_LINES
    assert len(shown["commands"].splitlines()) == 3
    names: dict[str, Any] = {}
    exec(compile(shown["my_verifier.py"], "my_verifier.py", "exec"), names)
    reference = json.loads(shown["problems.jsonl"])["reference"]
    assert names["score"](reference, f"20 + 31 = {reference}.") == 1.0
    of_it = ("1{}", "3.{}", "-{}", "1,0{}", "{} or 52")
    for wrong in ("It is 50.", *(text.format(reference) for text in of_it), "", "???"):
        assert names["score"](reference, wrong) == 0.0, wrong
