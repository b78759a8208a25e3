"""Nothing in the project turns bytes into code or arbitrary objects: such a reader runs whatever its sender wrote."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("mrl", "tools")

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec"}
METHODS = {
    "recv_pyobj", "send_pyobj", "read_pickle", "to_pickle",
    # torch.distributed pickles what these carry
    "broadcast_object_list", "scatter_object_list", "all_gather_object", "gather_object",
}  # fmt: skip
LOADERS = {
    "torch.load": "weights_only",
    "torch.serialization.load": "weights_only",
    "numpy.load": None,
    "numpy.lib.npyio.load": None,
}
"""Functions that can unpickle; with the keyword that has to be True, None where the default is safe."""
ALLOWED: dict[str, str] = {
    "mrl/tasks/benchmarks/programs.py:exec": "runs what a policy wrote, in a sealed process that is there for it alone",
}
"""path:what -> why it cannot be avoided and where the bytes come from."""


def imported(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, local name and full dotted name of everything imported, dynamic imports with a literal name included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    top = alias.name.partition(".")[0]
                    yield node.lineno, alias.asname or top, alias.name if alias.asname else top
                    if not alias.asname:
                        yield node.lineno, "", alias.name
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((node.lineno, alias.asname or alias.name, f"{module}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, "", name


def dotted(node: ast.AST) -> str:
    """The whole name ("a.b.c") of an attribute of an attribute of a name; empty for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            before = dotted(value)
            return f"{before}.{attr}" if before else ""
    return ""


def loader_fault(name: str, keywords: dict[str, ast.expr] | None) -> str:
    """What is wrong with a use of a function that can unpickle; `keywords` is None where it is not called."""
    needed = LOADERS[name]
    given = keywords or {}
    if needed is not None and not is_literal(given.get(needed), True):
        return f"{name} without {needed}=True"
    if "allow_pickle" in given and not is_literal(given["allow_pickle"], False):
        return f"{name} with allow_pickle"
    return f"{name} with keywords that cannot be seen" if None in given else ""


def is_literal(node: ast.expr | None, value: object) -> bool:
    """Whether the expression is this constant."""
    return isinstance(node, ast.Constant) and node.value is value


def faults_in(text: str) -> Iterator[tuple[int, str]]:
    """Line and kind of every fault of one module."""
    tree = ast.parse(text)
    names: dict[str, str] = {}
    for line, local, full in imported(tree):
        names |= {local: full} if local else {}
        if full.partition(".")[0] in MODULES:
            yield line, full.partition(".")[0]
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name in BUILTINS and id(node) in called:
                yield node.lineno, name
            case ast.Attribute(attr=name) if name in METHODS:
                yield node.lineno, name
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]) if name in METHODS:
                yield node.lineno, str(name)
            case ast.alias(name=name) if name in METHODS:
                yield node.lineno, name
        if isinstance(node, ast.Name | ast.Attribute):
            top, dot, rest = dotted(node).partition(".")
            full = names.get(top, top) + dot + rest
            call = called.get(id(node))
            if full in LOADERS:
                keywords = None if call is None else {one.arg: one.value for one in call.keywords}
                if fault := loader_fault(full, keywords):
                    yield node.lineno, fault


def faults(root: Path, allowed: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Every fault below the folders of a tree as `path:line: what`, and every allowance that nothing needs."""
    found: list[str] = []
    needed: set[str] = set()
    for file in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        where = file.relative_to(root).as_posix()
        for line, what in sorted(set(faults_in(file.read_text(encoding="utf-8")))):
            if f"{where}:{what}" in allowed:
                needed.add(f"{where}:{what}")
            else:
                found.append(f"{where}:{line}: {what}")
    return found + [f"{name}: allowed without need" for name in allowed if name not in needed]


def plant(folder: Path, path: str, text: str) -> Path:
    """A toy tree with one module in it."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return folder


def test_nothing_in_the_project_runs_what_it_reads() -> None:
    """Neither the package nor the tools."""
    assert faults(ROOT, ALLOWED) == []


@pytest.mark.parametrize("path", ["mrl/records/a.py", "tools/a.py"])
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import pickle", "pickle"),
        ("import os, pickle as p", "pickle"),
        ("from pickle import loads", "pickle"),
        ("def f():\n    import cloudpickle.cloudpickle", "cloudpickle"),
        ("import marshal", "marshal"),
        ("import shelve", "shelve"),
        ("import importlib\nimportlib.import_module('pickle')", "pickle"),
        ("__import__('dill')", "dill"),
        ("eval('1')", "eval"),
        ("exec('1')", "exec"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("socket.send_pyobj(1)", "send_pyobj"),
        ("getattr(socket, 'recv_pyobj')()", "recv_pyobj"),
        ("from torch.distributed import all_gather_object", "all_gather_object"),
        ("import torch\ntorch.load('x')", "torch.load without weights_only=True"),
        ("import torch as t\nt.load('x')", "torch.load without weights_only=True"),
        ("import torch.nn\ntorch.load('x', weights_only=False)", "torch.load without weights_only=True"),
        ("import torch\ntorch.load('x', weights_only=flag)", "torch.load without weights_only=True"),
        ("from torch import load as read\nread('x')", "torch.load without weights_only=True"),
        ("import torch\nread = torch.load", "torch.load without weights_only=True"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "numpy.load with allow_pickle"),
        ("from numpy import load\nload('x', allow_pickle=flag)", "numpy.load with allow_pickle"),
        ("import numpy\nnumpy.load('x', **options)", "numpy.load with keywords that cannot be seen"),
    ],
)
def test_planted_faults_are_found(tmp_path: Path, path: str, text: str, what: str) -> None:
    """Each kind, planted alone, under an alias or inside a function, is named."""
    assert {fault.partition(": ")[2] for fault in faults(plant(tmp_path, path, text + "\n"))} == {what}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load('x', weights_only=True)",
        "import safetensors.torch\nsafetensors.torch.load(b'')",
        "import numpy as np\nnp.load('x', allow_pickle=False)\nnp.load('x')",
        "import json\njson.load(file)\nmodel.eval()\nload('x')",
        '"""About pickle and eval()."""',
    ],
)
def test_what_is_safe_passes(tmp_path: Path, text: str) -> None:
    """Readers of plain data, methods named eval, and words in documentation are fine."""
    assert faults(plant(tmp_path, "mrl/a.py", text + "\n")) == []


def test_an_allowance_covers_one_kind_in_one_file_and_has_to_be_needed(tmp_path: Path) -> None:
    """Everything else in that file is still found."""
    root = plant(tmp_path, "mrl/a.py", "import pickle\neval('1')\n")
    allowed = {"mrl/a.py:pickle": "reads its own file", "mrl/b.py:pickle": "was needed once"}
    assert faults(root, allowed) == ["mrl/a.py:2: eval", "mrl/b.py:pickle: allowed without need"]
