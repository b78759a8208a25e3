"""The folder of the tools, so that tests can import them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
