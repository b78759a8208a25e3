"""One name, one thing; and nothing public that nobody calls."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

UNCALLED: dict[str, str] = {
    "mrl/engines/slot_cache.py:get_seq_length": "called by transformers",
    "mrl/engines/slot_cache.py:get_mask_sizes": "called by transformers",
    "mrl/engines/recipes/sglang_cpu/sgl_kernel.py:create_module": "called by Python at an import",
    "mrl/engines/recipes/sglang_cpu/sgl_kernel.py:exec_module": "called by Python at an import",
    "mrl/processes/exchange.py:handle_error": "called by socketserver",
    "mrl/processes/exchange.py:log_message": "called by wsgiref",
}
"""Public functions without a caller in the package -> who calls them."""


@cache
def trees(package: Path) -> dict[str, ast.Module]:
    """Path below the package's parent -> its tree."""
    return {
        file.relative_to(package.parent).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(package.rglob("*.py"))
    }


def shared_names(package: Path) -> list[str]:
    """Modules, and public classes, that share a name."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees(package).items():
        module = path.rpartition("/")[2]
        if not module.startswith("__"):
            places[module].append(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every name that is read, every attribute, and every string that could name a function."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)) if len(text) < 80:
                yield text.rpartition(":")[2].rpartition(".")[2]


def uncalled(package: Path) -> list[str]:
    """`module:function` of public functions and methods that nothing in the package names."""
    found = trees(package)
    named = Counter(name for tree in found.values() for name in names_in(tree))
    return [
        f"{path}:{node.name}"
        for path, tree in found.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not named[node.name]
    ]


def test_no_two_modules_and_no_two_classes_share_a_name() -> None:
    """A stack trace, or a search by name, leads to one place."""
    assert shared_names(ROOT / "mrl") == []


def test_everything_public_has_a_caller() -> None:
    """A function, a command or a name for users calls it; what only a test or a benchmark calls is removed."""
    assert sorted(uncalled(ROOT / "mrl")) == sorted(UNCALLED)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a/x.py": "", "b/x.py": ""}, ["x.py: mrl/a/x.py, mrl/b/x.py"]),
        ({"a/__init__.py": "", "b/__init__.py": ""}, []),
        ({"a/x.py": "class A: ...", "b/y.py": "class A: ..."}, ["A: mrl/a/x.py, mrl/b/y.py"]),
        ({"a/x.py": "class _A: ...", "b/y.py": "class _A: ..."}, []),
    ],
)
def test_a_shared_name_is_found(tmp_path: Path, files: dict[str, str], told: list[str]) -> None:
    """Where both stand; what is private may share."""
    for path, text in files.items():
        (tmp_path / "mrl" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mrl" / path).write_text(text)
    assert shared_names(tmp_path / "mrl") == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def f(): ...", ["mrl/a.py:f"]),
        ("def _f(): ...", []),
        ("def f(): ...\nf()", []),
        ("class A:\n    def f(self): ...", ["mrl/a.py:f"]),
        ("class A:\n    def f(self): ...\nA().f()", []),
        ("def f(): ...\n__all__ = ['f']", []),
    ],
)
def test_what_nobody_calls_is_found(tmp_path: Path, text: str, told: list[str]) -> None:
    """By its module and name."""
    (tmp_path / "mrl").mkdir()
    (tmp_path / "mrl" / "a.py").write_text(text)
    assert uncalled(tmp_path / "mrl") == told
