"""The laws of size: lengths, arguments, modules of a room. What may break one stands here, with its reason."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODULE_LINES, FUNCTION_LINES, POSITIONAL_ARGUMENTS, MODULES_OF_A_ROOM = 400, 60, 5, 25
ALLOWED: dict[str, str] = {
    "mrl/errors.py:_rebuild_user_error": "called by place, with the arguments that an error carries",
    "mrl/objectives/logprobs.py:forward": "torch gives the arguments of an autograd function by place",
}
"""Module, `module:function` or room, below the root -> why it may be larger."""


def modules(package: Path) -> Iterator[tuple[str, str]]:
    """Path below the package's parent, and text, of every module."""
    for file in sorted(package.rglob("*.py")):
        yield file.relative_to(package.parent).as_posix(), file.read_text(encoding="utf-8")


def functions(package: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """`module:function` of every function and method, and its tree."""
    for path, text in modules(package):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path}:{node.name}", node


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to its end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def num_positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Arguments that can be given by place, the object itself left aside."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def too_large(package: Path) -> dict[str, str]:
    """Module, function or room -> which law it breaks, and how."""
    found = {path: f"{text.count(chr(10))} lines" for path, text in modules(package) if text.count("\n") > MODULE_LINES}
    for name, node in functions(package):
        if num_lines(node) > FUNCTION_LINES:
            found[name] = f"{num_lines(node)} lines"
        if num_positional(node) > POSITIONAL_ARGUMENTS:
            found[name] = f"{num_positional(node)} positional arguments"
    rooms = Counter(path.rpartition("/")[0] for path, _ in modules(package) if not path.endswith("/__init__.py"))
    return found | {room: f"{count} modules" for room, count in rooms.items() if count > MODULES_OF_A_ROOM}


def broken(found: Mapping[str, str], allowed: Mapping[str, str]) -> list[str]:
    """What breaks a law without leave, and leaves that nothing needs."""
    lines = [f"{name}: {what}" for name, what in found.items() if name not in allowed]
    return lines + [f"{name}: allowed without need" for name in allowed if name not in found]


def plant(folder: Path, name: str, text: str) -> Path:
    """A toy package with one module more in it; returns the package folder."""
    package = folder / "mrl"
    package.mkdir(exist_ok=True)
    (package / name).write_text(text, encoding="utf-8")
    return package


def test_everything_keeps_the_laws_of_size() -> None:
    """Modules, functions and rooms of the package; of the tools, which are scripts, modules and functions."""
    tools = {name: what for name, what in too_large(ROOT / "tools").items() if not what.endswith("modules")}

    assert broken(too_large(ROOT / "mrl") | tools, ALLOWED) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\n" * 401, "mrl/a.py: 401 lines"),
        ("x = 1\n" * 400, ""),
        ("class A:\n    def f(self):\n" + "        x = 1\n" * 60, "mrl/a.py:f: 61 lines"),
        ("async def f():\n" + "    x = 1\n" * 59, ""),
        ("class A:\n    def f(self, a, b, c, d, e, g): ...\n", "mrl/a.py:f: 6 positional arguments"),
        ("class A:\n    def f(self, a, b, c, d, e, *, g, h): ...\n", ""),
    ],
)
def test_what_is_too_large_is_found(tmp_path: Path, text: str, told: str) -> None:
    """A line, an argument too many is named; one less is not."""
    assert broken(too_large(plant(tmp_path, "a.py", text)), {}) == ([told] if told else [])


def test_a_crowded_room_is_found(tmp_path: Path) -> None:
    """26 modules beside `__init__` are one too many."""
    for number in range(26):
        package = plant(tmp_path, f"m{number}.py", "")
    plant(tmp_path, "__init__.py", "")

    assert broken(too_large(package), {}) == ["mrl: 26 modules"]
    (package / "m0.py").unlink()
    assert too_large(package) == {}


def test_an_allowance_without_need_is_found(tmp_path: Path) -> None:
    """An entry of the list for what is small again has to go."""
    assert broken({}, {"mrl/a.py": "was long"}) == ["mrl/a.py: allowed without need"]
    assert broken({"mrl/a.py": "401 lines"}, {"mrl/a.py": "a table"}) == []
