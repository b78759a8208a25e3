"""Stands in for SGLang's kernel package, which has no build for this machine, so that SGLang can be imported.

Only SGLang's torch code paths run then. Whatever does reach for a kernel fails at the call, by name.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.4.10"


class _Missing:
    """A name of the kernel package: can be imported, has any attribute, and cannot be called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        return _missing(self._name, name)

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self._name}: SGLang's kernels are not on this machine, only a stand-in")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every `sgl_kernel.name` can be imported as well."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        is_ours = fullname.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """An ordinary module will do."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = lambda name: _missing(module.__name__, name)


def _missing(owner: str, name: str) -> _Missing:
    if name.startswith("__"):  # what Python itself asks for is honestly not there
        raise AttributeError(f"{owner}.{name}")
    return _Missing(f"{owner}.{name}")


def __getattr__(name: str) -> _Missing:
    return _missing(__name__, name)


__path__: list[str] = []
sys.meta_path.append(_Submodules())
