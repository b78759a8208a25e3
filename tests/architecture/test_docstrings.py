"""Docstrings name what they speak of."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NOUNLESS = re.compile(r"(What|Who|Whoever|Whatever|Of|Those|These|It|Its|They|All of them|The same)\b")
"""Openings that stand for a noun which only the code tells."""


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every string that stands alone: docstrings of modules, classes, functions, constants and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def nounless(package: Path) -> list[str]:
    """`module:line` and the opening of docstrings that begin without a noun or a verb."""
    return [
        f"{file.relative_to(package.parent).as_posix()}:{found.lineno} {opening[0]}"
        for file in sorted(package.rglob("*.py"))
        for found in docstrings(ast.parse(file.read_text(encoding="utf-8")))
        if (opening := NOUNLESS.match(str(found.value).lstrip()))
    ]


def test_docstrings_name_their_subject() -> None:
    """A stranger who reads one alone knows which thing it is of."""
    assert nounless(ROOT / "mrl") == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('"""What is held."""', ["mrl/a.py:1 What"]),
        ('A = 1\n"""Of each turn."""', ["mrl/a.py:2 Of"]),
        ('class A:\n    """All of them, in one loop."""', ["mrl/a.py:2 All of them"]),
        ('def f():\n    """Item of a list."""', []),
        ('A = "What is held"', []),
    ],
)
def test_a_docstring_without_a_noun_is_found(tmp_path: Path, text: str, told: list[str]) -> None:
    """By its module, line and opening."""
    (tmp_path / "mrl").mkdir()
    (tmp_path / "mrl" / "a.py").write_text(text)
    assert nounless(tmp_path / "mrl") == told
