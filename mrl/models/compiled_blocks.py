"""Compilation of blocks by torch.compile (`learner.compile`), all but their attention: its rows differ from pass to
pass.
"""

import sys
import sysconfig
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mrl.errors import ConfigError
from mrl.models.row_attention import register_row_attention


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Have blocks compiled at their first call, in place: once for all blocks and all lengths of passes.

    Hooks that are put around a block afterwards, to gather its parameters or to run it again, are not compiled.

    Raises ConfigError on a host without a compiler of C++, or without the headers of Python.
    """
    _check_compiler()
    register_row_attention(torch.compiler.disable)
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)


def as_written() -> AbstractContextManager[Any]:
    """Return a context in which compiled blocks run uncompiled: for a call that is not worth its own compilation."""
    can_compile = "torch._dynamo" in sys.modules  # the import alone would take seconds
    return torch.compiler.set_stance("force_eager") if can_compile else nullcontext()


def _check_compiler() -> None:
    # Imported here, as they take seconds to import.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "learner.compile: no C++ compiler found",
            wanted="g++, or another compiler named by CXX in the environment",
            cure="install one (apt install g++), or set learner.compile = false",
        ) from error
    header = Path(sysconfig.get_path("include"), "Python.h")
    # inductor and triton compile modules of Python. Where its headers lack, torch only warns, and fails in a step.
    if sys.platform == "linux" and not header.exists():
        raise ConfigError(
            "learner.compile: the Python headers are missing",
            wanted=str(header),
            cure="install them (apt install python3-dev), or set learner.compile = false",
        )
