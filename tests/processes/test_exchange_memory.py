"""The exchange's process takes no more memory than it may."""

import subprocess
import sys

HUNGRY = """
import sys
from mrl.processes.exchange import data_bytes, limit_memory
limit_memory(data_bytes() + 256 * 2**20)
limit_memory(data_bytes() + 2**40)  # a second limit is not higher
kept = bytearray(64 * 2**20)
try:
    bytearray(512 * 2**20)
except MemoryError:
    sys.exit(7)
"""


def test_memory_has_an_end_above_what_is_in_use():
    """What libraries took before does not count."""
    assert subprocess.run([sys.executable, "-c", HUNGRY], check=False).returncode == 7
