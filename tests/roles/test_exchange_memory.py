"""The exchange's process gives memory back, and takes no more than it may."""

import subprocess
import sys

import pytest

HUNGRY = """
import sys
from mrl.roles.exchange_memory import data_bytes, limit_memory
limit_memory(data_bytes() + 256 * 2**20)
limit_memory(data_bytes() + 2**40)  # a second limit is not higher
kept = bytearray(64 * 2**20)
try:
    bytearray(512 * 2**20)
except MemoryError:
    sys.exit(7)
"""
# Large blocks with a small one above each, so that none of them lies at the end of the heap when it is let go of.
HOLES = """
import sys
from pathlib import Path
from mrl.roles.exchange_memory import compact_heap

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256

if sys.argv[1] == "compact":
    assert compact_heap()
bytearray(8 * 2**20)  # by the length of what is let go of, malloc guesses what is usual
before = resident_mib()
blocks, pins = [], []
for _ in range(8):
    blocks.append(bytearray(8 * 2**20))
    pins.append(bytearray(2**16))
full = resident_mib()
blocks.clear()
print(full - before, resident_mib() - before)
"""


def test_memory_has_an_end_above_what_is_in_use():
    """What libraries took before does not count."""
    assert subprocess.run([sys.executable, "-c", HUNGRY], check=False).returncode == 7


@pytest.mark.parametrize(("heap", "is_left"), [("compact", False), ("as it is", True)])
def test_what_is_let_go_of_returns_to_the_system(heap, is_left):
    """Long messages leave holes in the heap otherwise."""
    done = subprocess.run([sys.executable, "-c", HOLES, heap], check=True, capture_output=True, text=True)
    used_mib, left_mib = map(int, done.stdout.split())
    assert used_mib >= 60
    assert (left_mib > 30) is is_left
