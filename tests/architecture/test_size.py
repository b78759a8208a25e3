"""Modules and functions keep their budgets; exceptions stand here, each with its reason."""

import ast
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]

MODULE_MEDIAN, MODULE_LIMIT = 150, 400
FUNCTION_MEDIAN, FUNCTION_LIMIT = 12, 60
ALLOWED_MODULES: dict[str, str] = {}
ALLOWED_FUNCTIONS: dict[str, str] = {}


def module_lines(package: Path) -> dict[str, int]:
    """Lines of every module, by path."""
    return {
        file.relative_to(package.parent).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in sorted(package.rglob("*.py"))
    }


def function_lines(package: Path) -> dict[str, int]:
    """Lines of every function and method from `def` to its end, by path and name."""
    return {
        f"{file.relative_to(package.parent).as_posix()}:{node.name}:{node.lineno}": node.end_lineno - node.lineno + 1
        for file in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }


def over_budget(sizes: dict[str, int], *, middle: int, limit: int, allowed: dict[str, str]) -> list[str]:
    """What is too long, a median that is too high, and allowances that nothing needs any more."""
    named = {name: name.rsplit(":", 1)[0] if name.count(":") == 2 else name for name in sizes}
    long = {name for name, lines in sizes.items() if lines > limit}
    found = [f"{name}: {sizes[name]} lines, limit {limit}" for name in sorted(long) if named[name] not in allowed]
    found += [f"{name}: allowed without need" for name in allowed if name not in {named[one] for one in long}]
    if sizes and median(sizes.values()) > middle:
        found.append(f"median {median(sizes.values())} lines, limit {middle}")
    return found


def plant(folder: Path, name: str, text: str) -> Path:
    """A toy package with one module in it; returns the package folder."""
    package = folder / "mrl"
    package.mkdir(exist_ok=True)
    (package / name).write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(("package", "middle"), [("mrl", MODULE_MEDIAN), ("tools", MODULE_LIMIT)])
def test_modules_keep_their_budget(package: str, middle: int) -> None:
    """The median module has at most 150 lines, no module more than 400; of a few scripts a median says nothing."""
    sizes = module_lines(ROOT / package)

    assert over_budget(sizes, middle=middle, limit=MODULE_LIMIT, allowed=ALLOWED_MODULES) == []


@pytest.mark.parametrize("package", ["mrl", "tools"])
def test_functions_keep_their_budget(package: str) -> None:
    """The median function has at most 12 lines, no function more than 60."""
    sizes = function_lines(ROOT / package)

    assert over_budget(sizes, middle=FUNCTION_MEDIAN, limit=FUNCTION_LIMIT, allowed=ALLOWED_FUNCTIONS) == []


def test_a_long_module_is_found(tmp_path: Path) -> None:
    """A module of 401 lines is named, one of 400 is not."""
    plant(tmp_path, "long.py", "x = 1\n" * 401)
    package = plant(tmp_path, "short.py", "x = 1\n" * 400)

    assert over_budget(module_lines(package), middle=1000, limit=400, allowed={}) == [
        "mrl/long.py: 401 lines, limit 400"
    ]


def test_a_long_function_is_found_also_inside_a_class(tmp_path: Path) -> None:
    """A method of 61 lines is named with its line, one of 60 is not."""
    text = (
        "class A:\n    def long(self):\n"
        + "        x = 1\n" * 60
        + "    async def short(self):\n"
        + "        x = 1\n" * 59
    )
    sizes = function_lines(plant(tmp_path, "a.py", text))

    assert over_budget(sizes, middle=100, limit=60, allowed={}) == ["mrl/a.py:long:2: 61 lines, limit 60"]
    assert over_budget(sizes, middle=100, limit=60, allowed={"mrl/a.py:long": "a table of cases"}) == []


def test_a_high_median_is_found() -> None:
    """The median counts even where every single one is under the limit."""
    assert over_budget({"a": 20, "b": 13, "c": 1}, middle=12, limit=60, allowed={}) == ["median 13 lines, limit 12"]


def test_an_allowance_without_need_is_found() -> None:
    """An entry of the allow-list that is short again has to go."""
    assert over_budget({"a.py": 10}, middle=12, limit=60, allowed={"a.py": "was long"}) == [
        "a.py: allowed without need"
    ]
