"""mrl: language models of different families learn from each other (mutual reinforcement learning, arXiv 2605.07244)

As a library: `load` a configuration, `train` it, `open` what a run left; docs/python.md shows how.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.python_api import Policy, Run, Step, load, open, train

__version__ = "0.1.0"
__all__ = ["Policy", "Run", "Step", "load", "open", "train"]


def __getattr__(name: str) -> Any:
    """Names of the library; its module is imported when one is asked for, so that small programs stay small."""
    if name in __all__:
        return getattr(importlib.import_module("mrl.python_api"), name)
    raise AttributeError(f"module 'mrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What there is, for who asks an interactive shell."""
    return sorted({*globals(), *__all__})
