"""SGLang's entry on a CPU, where it is to say which experts tokens went to.

The table that it keeps them in (0.5.23) lies in memory that a GPU has to know, which no CPU build can ask for; there it
is ordinary memory. The processes that the server spawns run this file as well, up to the last lines.
"""

import os
import sys
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS


def _ordinary_memory(dims: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


ALLOC_MEMORY_FUNCS["cpu"] = _ordinary_memory

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
