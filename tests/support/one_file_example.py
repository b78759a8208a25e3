"""`examples/mutual_rl.py` as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parents[2] / "examples" / "mutual_rl.py"


def load_example() -> ModuleType:
    """Load the example; it stays in `sys.modules`, where its dataclasses look for their module."""
    spec = importlib.util.spec_from_file_location("mutual_rl", FILE)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["mutual_rl"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
