"""Entry of an SGLang server on a CPU that has to tell which experts tokens went to.

SGLang (0.5.23) keeps experts in a table in pinned memory, which a CPU build cannot allocate; with this entry the table
lies in ordinary memory. The processes that the server spawns run this file as well, without the part under
`__name__ == "__main__"`.
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
