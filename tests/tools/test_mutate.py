"""Mistakes at the keyboard of tools/mutate.py; a run itself takes minutes, and is made by name."""

import sys

import mutate
import pytest


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mrl/alignment/no_such.py"], "mrl/alignment/no_such.py: wanted a module of mrl/"),
        (["tools/mutate.py"], "tools/mutate.py: wanted a module of mrl/"),
        (["mrl/alignment/shared_spans.py", "tests/no_such"], "tests/no_such: there are no such tests"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, arguments, told):
    """What was given, and what is wanted; exit code 2."""
    monkeypatch.chdir(mutate.ROOT)
    monkeypatch.setattr(sys, "argv", ["mutate.py", *arguments])
    monkeypatch.setattr(mutate.importlib.util, "find_spec", lambda name: name)
    assert mutate.main() == 2
    assert told in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_cure(monkeypatch, capsys):
    """The extra that brings mutmut."""
    monkeypatch.chdir(mutate.ROOT)
    monkeypatch.setattr(sys, "argv", ["mutate.py", "mrl/alignment/shared_spans.py"])
    monkeypatch.setattr(mutate.importlib.util, "find_spec", lambda name: None)
    assert mutate.main() == 2
    assert "pip install -e '.[mutation]'" in capsys.readouterr().err
