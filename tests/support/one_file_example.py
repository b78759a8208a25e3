"""`examples/mutual_rl.py` as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parents[2] / "examples" / "mutual_rl.py"


def load_example() -> ModuleType:
    """Its dataclasses look for the module among those that are loaded, so there it stays."""
    spec = importlib.util.spec_from_file_location("mutual_rl", FILE)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["mutual_rl"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
