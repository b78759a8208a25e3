"""What several tests of commands need lies in `rig` and is imported by name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "rig"))
