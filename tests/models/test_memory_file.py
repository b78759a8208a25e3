"""Files in memory where there is too little of it: one line, and nothing half made."""

import subprocess
import sys

import pytest
import torch

from mrl.errors import DeviceError
from mrl.models import memory_file
from mrl.models.memory_file import MemoryFile
from mrl.models.tensor_file import shape_of

LINE = r"memory of this host: not enough memory for weights of a; got '(.*)'; wanted 0\.\d+ GB; cure: .*weights_in"


def test_what_would_not_fit_is_not_asked_for(monkeypatch) -> None:
    """The kernel grants it, and kills somebody when it is written to. What a file has already counts as room for it."""
    monkeypatch.setattr(memory_file, "free_memory_bytes", lambda: 9_000_000)
    file = MemoryFile("weights of a")
    file.lay_out([shape_of("w", torch.empty(8_000_000, dtype=torch.uint8))])
    file.lay_out([shape_of("w", torch.empty(16_000_000, dtype=torch.uint8))])
    with pytest.raises(DeviceError, match=LINE) as error:
        file.lay_out([shape_of("w", torch.empty(80_000_000, dtype=torch.uint8))])
    assert error.value.got == "0.03 GB free"
    file.close()


def test_what_the_kernel_refuses_is_one_line(tmp_path) -> None:
    """Here by the process's limit of a file's size, which holds for files in memory as well."""
    script = """
import resource, torch
from mrl.models.memory_file import MemoryFile
from mrl.models.tensor_file import shape_of
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
MemoryFile("weights of a").lay_out([shape_of("w", torch.empty(80_000_000, dtype=torch.uint8))])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "DeviceError: memory of this host: not enough memory for weights of a; got 'File too large; " in ended.stderr
