"""Contracts on properties of engines that mrl relies on, and checks of them by parsed modules, which never run."""

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

DIGEST_DIGITS = 12
Function = ast.FunctionDef | ast.AsyncFunctionDef
LEFT_OUT = ("ctx", "kind", "type_comment", "type_params", "returns")
"""Fields of syntax trees that say nothing of the computation, or differ between versions of Python."""


class Check(Protocol):
    """A property to look for in a module."""

    def found(self, module: ast.Module) -> str:
        """Return "" where it holds; else a description of the module's content in its place."""


@dataclass(frozen=True)
class Contract:
    """A property of an engine's file that mrl relies on."""

    what: str
    """Words for a broken contract: the property that mrl relies on, and its purpose."""
    file: str
    """Path of the file in the wheel."""
    check: Check
    look_at: str
    """Places in mrl and tests to look at when the contract is broken."""
    pins: tuple[str, ...] = ("cpu", "gpu")


class Modules(Mapping[str, ast.Module]):
    """Parsed files of a wheel by their path in it; texts in `changed` take the place of those on disk."""

    def __init__(self, folder: Path, changed: Mapping[str, str] | None = None) -> None:
        self._folder, self._changed = folder, dict(changed or {})
        self._parsed: dict[str, ast.Module] = {}

    def text(self, file: str) -> str:
        """Return a file's source. Raises KeyError where the wheel has no such file."""
        if file in self._changed:
            return self._changed[file]
        try:
            return (self._folder / file).read_text(encoding="utf-8")
        except OSError as error:
            raise KeyError(file) from error

    def __getitem__(self, file: str) -> ast.Module:
        if file not in self._parsed:
            self._parsed[file] = ast.parse(self.text(file))
        return self._parsed[file]

    def __iter__(self) -> Iterator[str]:
        return (str(path.relative_to(self._folder)) for path in self._folder.rglob("*.py"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def broken(contracts: Sequence[Contract], modules: Mapping[str, ast.Module], pin: str) -> list[str]:
    """Return a line for each contract of `pin` that does not hold."""
    lines = []
    for contract in contracts:
        if pin not in contract.pins:
            continue
        try:
            module = modules[contract.file]
        except KeyError:
            found = "no such file"
        else:
            found = contract.check.found(module)
        if found:
            lines.append(f"{contract.what}: {contract.file}: {found}; look at {contract.look_at}")
    return lines


@dataclass(frozen=True)
class Route:
    """A route of an HTTP server, declared by a decorator or by a call."""

    method: str
    path: str

    def found(self, module: ast.Module) -> str:
        methods = {method for path, method in _routes(module) if path == self.path}
        if self.method in methods:
            return ""
        return f"{self.path} takes {', '.join(sorted(methods))}" if methods else f"no route {self.path}"


@dataclass(frozen=True)
class Argument:
    """An argument of the command line, declared by `add_argument`."""

    flag: str

    def found(self, module: ast.Module) -> str:
        declared = {
            word for call in _calls(module) if _name(call.func) == "add_argument" for word in map(_literal, call.args)
        }
        return "" if self.flag in declared else f"no argument {self.flag}"


@dataclass(frozen=True)
class Field:
    """A field of a class that is declared with its type, and its default."""

    owner: str
    name: str
    default: Any = ...

    def found(self, module: ast.Module) -> str:
        owner = _named(module, self.owner)
        if not isinstance(owner, ast.ClassDef):
            return f"no class {self.owner}"
        for node in owner.body:
            if isinstance(node, ast.AnnAssign) and _name(node.target) == self.name:
                default = _default(node.value)
                return "" if self.default in (..., default) else f"{self.owner}.{self.name} is {default!r}"
        return f"no field {self.owner}.{self.name}"


@dataclass(frozen=True)
class Constant:
    """A constant with these literal values, in this order, or with these `among` others."""

    name: str
    values: tuple[Any, ...]
    among: bool = False

    def found(self, module: ast.Module) -> str:
        value = _assigned(module, self.name)
        if value is None:
            return f"no {self.name}"
        held = _literals(value)
        holds = set(self.values) <= set(held) if self.among else self.values == held
        return "" if holds else f"{self.name} is {held}"


@dataclass(frozen=True)
class Says:
    """Strings that occur in a function, a class, or the whole module."""

    texts: tuple[str, ...]
    inside: str = ""

    def found(self, module: ast.Module) -> str:
        place = _named(module, self.inside)
        if place is None:
            return f"no {self.inside}"
        said = [
            node.value for node in ast.walk(place) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        said += [node.arg for node in ast.walk(place) if isinstance(node, ast.keyword) and node.arg]
        missing = [text for text in self.texts if not any(text in one for one in said)]
        return f"{self.inside or 'it'} does not say {', '.join(map(repr, missing))}" if missing else ""


@dataclass(frozen=True)
class Takes:
    """A function or method with these parameters."""

    function: str
    parameters: tuple[str, ...] = ()

    def found(self, module: ast.Module) -> str:
        function = _named(module, self.function)
        if not isinstance(function, Function):
            return f"no function {self.function}"
        known = {one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
        missing = [name for name in self.parameters if name not in known]
        return f"{self.function} takes no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Returns:
    """A function that returns these literal values, and nothing else."""

    function: str
    values: tuple[Any, ...]

    def found(self, module: ast.Module) -> str:
        function = _named(module, self.function)
        if not isinstance(function, Function):
            return f"no function {self.function}"
        returned = [_literals(node.value) for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
        return "" if returned == [self.values] else f"{self.function} returns {returned}"


@dataclass(frozen=True)
class Uses:
    """Names, attributes or methods that a function, a class or the whole module uses."""

    names: tuple[str, ...]
    inside: str = ""

    def found(self, module: ast.Module) -> str:
        place = _named(module, self.inside)
        if place is None:
            return f"no {self.inside}"
        used = {_name(node) for node in ast.walk(place) if isinstance(node, ast.Name | ast.Attribute)}
        missing = [name for name in self.names if name not in used]
        return f"{self.inside or 'it'} uses no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Means:
    """The exact behaviour of functions: a digest of their syntax trees without documentation."""

    functions: tuple[str, ...]
    digest: str

    def found(self, module: ast.Module) -> str:
        missing = [name for name in self.functions if not isinstance(_named(module, name), Function)]
        if missing:
            return f"no function {', '.join(missing)}"
        digest = digest_of(module, self.functions)
        return "" if digest == self.digest else f"{', '.join(self.functions)} became {digest}, was {self.digest}"


def meaning(
    what: str, file: str, functions: tuple[str, ...], look_at: str, *, cpu: str = "", gpu: str = ""
) -> list[Contract]:
    """Make contracts on the behaviour of functions in one file, for the pins whose digests are given."""
    pins = (("cpu", cpu), ("gpu", gpu))
    return [Contract(what, file, Means(functions, digest), look_at, (pin,)) for pin, digest in pins if digest]


def digest_of(module: ast.Module, functions: Sequence[str]) -> str:
    """Return the digest that `Means` compares, equal for every layout of the text and in every version of Python."""
    digest = hashlib.sha256()
    for name in functions:
        digest.update(repr(_shape(_named(module, name))).encode())
    return digest.hexdigest()[:DIGEST_DIGITS]


def _shape(node: Any) -> Any:
    if isinstance(node, ast.AST):
        body = getattr(node, "body", None)
        if isinstance(node, Function) and isinstance(body, list) and _is_text(body[0]):
            node = type(node)(**{**dict(ast.iter_fields(node)), "body": body[1:]})
        fields = [(name, _shape(value)) for name, value in ast.iter_fields(node) if name not in LEFT_OUT]
        return (type(node).__name__, [(name, shape) for name, shape in fields if shape not in (None, [])])
    return [_shape(one) for one in node] if isinstance(node, list) else node


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(_literal(statement.value), str)


def _named(module: ast.Module, dotted: str) -> ast.AST | None:
    """Find a class or function by its dotted name, also inside a function or condition; "" finds the module."""
    place: ast.AST | None = module
    for name in dotted.split(".") if dotted else ():
        within = ast.walk(place) if place is not None else iter(())
        place = next((one for one in within if isinstance(one, ast.ClassDef | Function) and one.name == name), None)
    return place


def _calls(place: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(place) if isinstance(node, ast.Call))


def _routes(module: ast.Module) -> Iterator[tuple[str, str]]:
    for call in _calls(module):
        kind, path = _name(call.func), _literal(call.args[0]) if call.args else None
        if not isinstance(path, str):
            continue
        if kind in ("get", "post", "put", "delete"):
            yield path, kind.upper()
        for keyword in call.keywords:
            if kind in ("api_route", "add_api_route") and keyword.arg == "methods":
                yield from ((path, method) for method in _literals(keyword.value))


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.AST | None) -> Any:
    """Return a literal's value; None for other expressions."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError):
        return None


def _default(node: ast.AST | None) -> Any:
    if isinstance(node, ast.Call) and _name(node.func) in ("Field", "field"):
        return next((_literal(keyword.value) for keyword in node.keywords if keyword.arg == "default"), None)
    return _literal(node)


def _assigned(module: ast.Module, dotted: str) -> ast.AST | None:
    owner, _, name = dotted.rpartition(".")
    place = _named(module, owner)
    for node in ast.walk(place) if place is not None else ():
        targets: Sequence[ast.AST] = node.targets if isinstance(node, ast.Assign) else ()
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(_name(target) == name for target in targets):
            return node.value  # type: ignore[union-attr]
    return None


def _literals(node: ast.AST) -> tuple[Any, ...]:
    """Return the values of a literal, a collection of literals, or typing's Literal; of a mapping its keys."""
    if isinstance(node, ast.Subscript):
        node = node.slice
    if isinstance(node, ast.Dict):
        return tuple(_literal(key) for key in node.keys)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return tuple(_literal(one) for one in node.elts)
    return (_literal(node),)
