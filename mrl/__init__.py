"""mrl: language models of different families learn from each other (mutual reinforcement learning, arXiv 2605.07244).

As a library: `load` a configuration, `train` it, `open` the folder of a run; docs/python.md shows how.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.python_api import Policy, Run, Step, load, open, train

__version__ = "0.1.0"
__all__ = ["Policy", "Run", "Step", "load", "open", "train"]


def __getattr__(name: str) -> Any:
    """Import `mrl.python_api` at the first use of one of its names, so that programs which use none stay small."""
    if name in __all__:
        return getattr(importlib.import_module("mrl.python_api"), name)
    raise AttributeError(f"module 'mrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names of the module and of the library, for the completion of an interactive shell."""
    return sorted({*globals(), *__all__})
