"""Plug-ins: regimes, task sources, verifiers and trackers outside mrl, found by the name in a configuration.

    "module:name"   an object in a module, which lies in the folder `run.modules` or on PYTHONPATH, or is installed
    "name"          an entry point of an installed distribution, in the group of its kind

Every process looks a plug-in up by itself, from the same name in the same configuration. Entry points are read as
metadata, and only the module of the named plug-in is imported. The parts of mrl itself are never looked for here.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mrl.errors import PluginError

MODULES = "MRL_MODULES"
"""Environment variable that passes `run.modules` to the processes of verifiers and trackers."""


class PluginKind(NamedTuple):
    """A kind of plug-in: regime, task source, verifier or tracker."""

    word: str
    group: str
    """Group of the kind's entry points."""


REGIME = PluginKind("regime", "mrl.regimes")
SOURCE = PluginKind("task source", "mrl.tasks")
VERIFIER = PluginKind("verifier", "mrl.verifiers")
TRACKER = PluginKind("tracker", "mrl.trackers")


class Plugin(NamedTuple):
    """A plug-in that was found and is not loaded yet."""

    kind: PluginKind
    name: str
    """Name in the configuration."""
    target: str
    """Place of the object, as "module:name"."""
    distribution: str = ""
    """Name and version of the distribution with the plug-in's entry point; "" when `name` is "module:name"."""

    @property
    def described(self) -> str:
        """Kind, name and target, and the distribution with its version or else the file; imports nothing."""
        module = self.target.partition(":")[0]
        origin = self.distribution or _distribution_of(module) or f"file {_file_of(module)}"
        target = "" if self.target == self.name else f" {self.target},"
        return f"{self.kind.word} {self.name}:{target} {origin}"


def short_name(name: str) -> str:
    """Name of a regime or tracker in keys and file names: the part after the colon of "module:name", or all of it."""
    return name.rpartition(":")[2]


def use_modules(folder: str) -> None:
    """Let this process, and those that it starts, find modules in `folder` (`run.modules`); "" for no folder.

    The folder comes last, so that no file in it takes the place of an installed module.
    """
    if folder:
        os.environ[MODULES] = folder
        _see(folder)
    else:
        os.environ.pop(MODULES, None)


def see_modules() -> None:
    """Let this process find modules in the folder that its environment names in MRL_MODULES."""
    _see(os.environ.get(MODULES, ""))


def find_plugin(kind: PluginKind, name: str, built_in: Iterable[str], *, where: str) -> Plugin:
    """Find the plug-in that `name` means, from metadata alone. `where` is the place for messages: file and key.

    Raises PluginError where no entry point has the name, where two have it, or where the name in "module:name" is a
    built-in name.
    """
    built_in = list(built_in)
    if ":" in name:
        found = Plugin(kind, name, name)
        if short_name(name) in built_in:
            what = f"this {kind.word} has the name of a built-in {kind.word}"
            raise PluginError(what, where=where, got=name, cure="rename the object in its module")
        return found
    points = list(importlib.metadata.entry_points(group=kind.group, name=name))
    owners = sorted({_named(point) for point in points})
    if len({point.value for point in points}) > 1 or len(owners) > 1:
        what = f"{len(points)} entry points of the group {kind.group} have this name"
        cure = f'uninstall one, or name "module:name": {" or ".join(sorted({point.value for point in points}))}'
        raise PluginError(what, where=where, got=name, wanted=f"one of {', '.join(owners)}", cure=cure)
    if points:
        return Plugin(kind, name, points[0].value.replace(" ", ""), owners[0])
    known = [*built_in, *sorted({point.name for point in importlib.metadata.entry_points(group=kind.group)})]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    own = f'for a {kind.word} of your own, write "{name}:FUNCTION"' if kind == VERIFIER else ""
    raise PluginError(
        f"no such {kind.word}",
        where=where,
        got=name,
        wanted=", ".join([*known, f'"module:name" or an entry point of the group {kind.group}']),
        cure=f"did you mean {near[0]}?" if near else own,
    )


def is_entry_point(kind: PluginKind, name: str) -> bool:
    """Whether an installed distribution offers a plug-in of this name; imports nothing."""
    return bool(importlib.metadata.entry_points(group=kind.group, name=name))


def check_shadow(kind: PluginKind, name: str, *, where: str) -> None:
    """Raises PluginError where an installed distribution offers a plug-in under the built-in `name`."""
    for point in importlib.metadata.entry_points(group=kind.group, name=name):
        raise PluginError(
            f"a {kind.word} of {_named(point)} has the name of a built-in {kind.word}",
            where=where,
            got=name,
            cure=f'to use it, set "{point.value}", with an object name of its own; or uninstall the distribution',
        )


def load_plugin(plugin: Plugin, fault_of: Callable[[Any], str], *, where: str) -> Any:
    """Import a plug-in's module and return its object. `fault_of` returns the fault of an object, or "".

    Raises PluginError where there is no such module, where its import raises an exception, where the module has no such
    name, or where the object is no plug-in of its kind.
    """
    module_name, _, name = plugin.target.partition(":")
    try:
        see_modules()
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(plugin, error, where) from None
        folder = os.environ.get(MODULES) or "the folder of the configuration file"
        raise PluginError(
            f"the module {error.name} of the {plugin.kind.word} was not found",
            where=where,
            got=plugin.name,
            wanted=f"a module that is installed, on PYTHONPATH, or in {folder}",
            cure=near_module(module_name),
        ) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything; the message tells it
        raise _broken(plugin, error, where) from None
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [one for one in vars(found) if not one.startswith("_")], n=1)
            what, cure = f"{module_name} has no {part}", f"did you mean {near[0]}?" if near else ""
            wanted = f"a {plugin.kind.word} in {getattr(module, '__file__', '') or module_name}"
            raise PluginError(what, where=where, got=plugin.name, wanted=wanted, cure=cure)
        found = getattr(found, part)
    if fault := fault_of(found):
        raise PluginError(f"{plugin.target} is not a {plugin.kind.word}", where=where, got=_shown(found), wanted=fault)
    return found


def near_module(module: str) -> str:
    """Return the question whether a file beside the configuration with a similar name was meant; "" without one."""
    folder = os.environ.get(MODULES, "")
    own = [file.stem for file in Path(folder).glob("*.py")] if folder else []
    near = difflib.get_close_matches(module, own, n=1)
    return f"did you mean {near[0]}?" if near else ""


def missing_names(found: object, names: Iterable[str]) -> str:
    """Return the attributes of `names` that an object lacks, in words; "" where it has them all."""
    lacking = [name for name in names if not hasattr(found, name)]
    return f"also {', '.join(lacking)}" if lacking else ""


def _see(folder: str) -> None:
    if folder and folder not in sys.path:
        sys.path.append(folder)


def _named(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"


def _distribution_of(module: str) -> str:
    """Return name and version of the distribution that installed a module; "" for a user's own file."""
    owners = importlib.metadata.packages_distributions().get(module.partition(".")[0], ())
    return ", ".join(f"{owner} {importlib.metadata.version(owner)}" for owner in dict.fromkeys(owners))


def _file_of(module: str) -> str:
    """Return the file of a module without importing it.

    "not imported yet" for a module that is in a package and not imported, or that cannot be found.
    """
    file = getattr(sys.modules.get(module), "__file__", "")
    if not file and "." not in module:
        see_modules()
        with suppress(ImportError, ValueError):
            file = getattr(importlib.util.find_spec(module), "origin", "")
    return str(file or "not imported yet")


def raised_at(error: BaseException) -> str:
    """Return the last line of the called file that ran before `error` was raised; "" where none ran.

    The error has to be caught in the function that made the call. A call that does not fit the signature runs no line.
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"line {own[-1].lineno} of {own[-1].filename}" if own else ""


def _broken(plugin: Plugin, error: BaseException, where: str) -> PluginError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    place = f"line {own[-1].lineno} of {own[-1].filename}" if own else plugin.target
    place = f"line {error.lineno} of {error.filename}" if isinstance(error, SyntaxError) else place
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    what = f"the module of the {plugin.kind.word} cannot be imported ({said})"
    return PluginError(what, where=where, got=plugin.name, cure=f"see {place}")


def _shown(found: object) -> str:
    return f"{'class' if isinstance(found, type) else type(found).__name__} {getattr(found, '__name__', found)}"[:80]
