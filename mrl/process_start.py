"""Settings at the start of every process of mrl: its limit of open files, and a private cache of compiled code."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_DESCRIPTORS = 65_536
"""Limit of open file descriptors. mrl needs no more, and programs that loop over every possible descriptor get slow."""
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the folder in which torch keeps compiled code, and runs the code that it finds. By default
torch takes a folder in the host's temporary one. Another user can foresee that name and make the folder first."""


def prepare() -> None:
    """Set the limit of open files and the folder of compiled code, for this process and for those that it starts.

    A folder of compiled code that the environment already names stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    cache = os.environ.get("MRL_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "mrl")
    os.environ.setdefault(COMPILED, str(Path(cache) / "torchinductor"))


@contextmanager
def importing() -> Iterator[None]:
    """Switch garbage collection off during imports: imported objects stay, and collecting takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
