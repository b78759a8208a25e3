"""Every command that a message of mrl names exists for somebody who has the package alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]

NAMED = re.compile(r"(?:`|^|cure: |run )mrl (?!run )([a-z][a-z-]*)")
"""A command as messages write it; a page that opens with "mrl run NAME" is titled so."""
ELSEWHERE = re.compile(r"\b(?:tools|launchers|tests|\.venv)/|\bbash \S+\.sh")
"""What only a copy of the repository has."""


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string that is no docstring; parts of a formatted one each by itself."""
    documented = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.lineno, node.value


def faults_in(text: str) -> list[str]:
    """`line: what` of names that lead nowhere."""
    found = []
    for line, said in texts_of(ast.parse(text)):
        found += [f"{line}: no command {name}" for name in NAMED.findall(said) if name not in COMMANDS]
        found += [f"{line}: only in the repository: {said}" for _ in ELSEWHERE.findall(said)[:1]]
    return found


def test_messages_name_commands_that_everybody_has() -> None:
    """Commands of mrl, and no file of the repository."""
    found = {file: faults_in(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "mrl").rglob("*.py"))}

    assert [f"{file.relative_to(ROOT)}:{fault}" for file, faults in found.items() for fault in faults] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('"""Made by `mrl nothing` and tools/x.sh."""', []),
        ('x = "the `mrl train` of it"', []),
        ('x = "see `mrl trian`"', ["1: no command trian"]),
        ('x = f"mrl nothing {y}"', ["1: no command nothing"]),
        ('x = "cure: bash tools/x.sh"', ["1: only in the repository: cure: bash tools/x.sh"]),
        ('x = "of mrl in general"', []),
    ],
)
def test_a_name_that_leads_nowhere_is_found(text: str, told: list[str]) -> None:
    """By its line."""
    assert faults_in(text) == told
