"""Who may import whom, and where heavy libraries live."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RANK = {
    "errors": 0, "files": 0, "fork_server": 1, "host_memory": 0, "hub_names": 0, "parent_death": 0,
    "plugins": 0, "process_start": 0, "records": 0,
    "plots": 1, "config": 1, "metrics": 1, "objectives": 1, "alignment": 1, "transport": 1,
    "tasks": 2, "models": 2, "exchange": 2, "allocation": 2, "sharing": 2, "bandit": 2,
    "engines": 3, "weights": 3,
    "gateway": 4, "learner": 4, "rollout": 4, "report": 4, "inspection": 4,
    "processes": 5,
    "memory_plan": 6,
    "cli": 7,
    "python_api": 8,
    "__main__": 9, "__init__": 9,
}  # fmt: skip
SAME_RANK = {
    ("records", "errors"): "decoding raises RecordError, and errors imports nothing",
    ("plugins", "errors"): "a plug-in that cannot be had is a user's mistake, and errors imports nothing",
}
INSIDE = ROOT / "mrl" / "engines" / "inside"
"""Files that run in the environments of other engines, where there is no mrl."""
HOMES = {
    "zmq": {"transport"},
    "torch": {"objectives", "models", "engines", "weights", "learner", "memory_plan"},
    "transformers": {"models", "engines"},
    "peft": {"models"},
    "aiohttp": {"engines", "gateway", "processes", "tasks"},
    "vllm": set(),
    "sglang": set(),
}
LIGHT_ROOMS = ["gateway", "exchange", "allocation", "sharing", "alignment", "config", "metrics", "records"]
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}


def room_of(file: Path, package: Path) -> str:
    """The first name below `mrl`: a package or a module of it."""
    return file.relative_to(package).parts[0].removesuffix(".py")


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, dynamic ones with a literal name included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from ((node.lineno, "." * level + f"{module or ''}.{alias.name}") for alias in names)
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                if node.args and isinstance(node.args[0], ast.Constant):
                    yield node.lineno, str(node.args[0].value)


def import_fault(here: str, name: str) -> str:
    """What is wrong when room `here` imports `name`; empty when nothing is."""
    top, *rest = name.split(".")
    if name.startswith("."):
        return "relative import"
    if top in HOMES and here not in HOMES[top]:
        return f"{top} lives in {sorted(HOMES[top])}, not in {here}"
    if top != "mrl" or not rest or rest[0] in (here, "__version__"):
        return ""
    if rest[0] not in RANK:
        return f"room {rest[0]} has no rank"
    if (here, rest[0]) not in SAME_RANK and RANK[rest[0]] >= RANK[here]:
        return f"{here} (rank {RANK[here]}) may not import {name} (rank {RANK[rest[0]]})"
    return ""


def faults_in(file: Path, package: Path) -> list[str]:
    """Every fault of one module, as `path:line: what`."""
    where, here = file.relative_to(package.parent).as_posix(), room_of(file, package)
    found = [f"{where}: the name {part} says nothing" for part in file.relative_to(package).with_suffix("").parts
             if FORBIDDEN_NAMES & set(part.split("_"))]  # fmt: skip
    if here not in RANK:
        return [*found, f"{where}: room {here} has no rank"]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    faulty = ((line, import_fault(here, name)) for line, name in imported_names(tree))
    return found + [f"{where}:{line}: {fault}" for line, fault in faulty if fault]


def faults(package: Path) -> list[str]:
    """Every fault below one package folder."""
    ours = (file for file in sorted(package.rglob("*.py")) if INSIDE not in file.parents)
    return [fault for file in ours for fault in faults_in(file, package)]


def heavy_modules_after_importing(root: Path, modules: list[str]) -> list[str]:
    """Which of torch, transformers, vllm and sglang are loaded once these modules are."""
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += "print(*sorted({'torch', 'transformers', 'vllm', 'sglang'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def modules_of(package: Path, rooms: list[str]) -> list[str]:
    """Dotted names of all modules of the rooms."""
    files = [file for room in rooms for file in sorted((package / room).rglob("*.py"))]
    return [
        ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__") for file in files
    ]


def plant(folder: Path, path: str, text: str) -> Path:
    """A toy package with one module in it; returns the package folder."""
    file = folder / "mrl" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return folder / "mrl"


def test_the_package_keeps_its_ranks_and_homes() -> None:
    """No module imports its own rank or a higher one, or a heavy library outside its home."""
    assert faults(ROOT / "mrl") == []


def test_what_runs_inside_other_engines_knows_nothing_of_mrl() -> None:
    """It is found there by its folder, and nothing of the package imports it."""
    names = {name for file in INSIDE.rglob("*.py") for _, name in imported_names(ast.parse(file.read_text()))}
    ours = {name for file in (ROOT / "mrl").rglob("*.py") for _, name in imported_names(ast.parse(file.read_text()))}

    assert any(name.startswith("vllm") for name in names)
    assert not any(name.split(".")[0] == "mrl" for name in names)
    assert not any(name.startswith("mrl.engines.inside") for name in ours)


def test_every_room_has_an_init_with_a_docstring() -> None:
    """A package that Python would treat as a namespace is a mistake, and its docstring states the protocol."""
    rooms = [room for room in sorted((ROOT / "mrl").iterdir()) if room.is_dir() and list(room.glob("*.py"))]

    missing = [room.name for room in rooms if not (room / "__init__.py").exists()
               or not ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))]  # fmt: skip

    assert missing == []


def test_light_rooms_import_without_heavy_libraries() -> None:
    """Exchange, allocation and the rooms they need load neither torch nor transformers."""
    assert heavy_modules_after_importing(ROOT, modules_of(ROOT / "mrl", LIGHT_ROOMS)) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("records/a.py", "import mrl.errors\nfrom mrl.errors import MRLError\n"),
        ("cli/a.py", "from mrl import __version__\nfrom mrl.processes.worker import main\n"),
        ("learner/a.py", "import torch.distributed\nfrom mrl.learner.b import c\n"),
        ("engines/a.py", "from transformers import AutoModel\n"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, path: str, text: str) -> None:
    """Lower ranks, the own room and heavy libraries at home are fine."""
    assert faults(plant(tmp_path, path, text)) == []


@pytest.mark.parametrize(
    ("path", "text", "word"),
    [
        ("exchange/a.py", "from mrl.processes.worker import main\n", "may not import"),
        ("exchange/a.py", "def f():\n    from mrl import allocation\n", "may not import"),
        ("errors.py", "import mrl.records\n", "may not import"),
        ("learner/a.py", "from . import b\n", "relative"),
        ("learner/a.py", "import zmq.auth\n", "zmq lives in"),
        ("processes/a.py", "def f():\n    import torch\n", "torch lives in"),
        ("processes/a.py", "import importlib\nimportlib.import_module('torch')\n", "torch lives in"),
        ("learner/a.py", "from transformers import AutoModel\n", "transformers lives in"),
        ("engines/a.py", "import vllm\n", "vllm lives in"),
        ("engines/a.py", "from sglang import Engine\n", "sglang lives in"),
        ("gadgets/a.py", "", "no rank"),
        ("learner/a.py", "import mrl.gadgets\n", "no rank"),
        ("learner/utils.py", "", "says nothing"),
        ("learner/weight_helpers.py", "", "says nothing"),
        ("manager/a.py", "", "says nothing"),
    ],
)
def test_planted_faults_are_found(tmp_path: Path, path: str, text: str, word: str) -> None:
    """Each kind of violation, planted alone in a toy tree, is named."""
    found = faults(plant(tmp_path, path, text))

    assert any(word in fault for fault in found), found


def test_a_heavy_import_of_a_light_room_is_found(tmp_path: Path) -> None:
    """An import that the source check cannot see is seen by running it."""
    (tmp_path / "torch.py").write_text("")
    package = plant(tmp_path, "exchange/a.py", "__builtins__['__import__']('to' + 'rch')\n")
    plant(tmp_path, "__init__.py", "")

    assert heavy_modules_after_importing(tmp_path, modules_of(package, ["exchange"])) == ["torch"]
