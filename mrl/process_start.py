"""What every process of mrl does first: descriptors up to its limit, and compiled code where nobody else writes."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_DESCRIPTORS = 65_536
"""Beyond that nothing of mrl has use for them, and programs that look at each possible one become slow."""
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps the code that it compiles, and runs what it finds. Left to itself it takes a folder in the host's
temporary one, whose name every user can foresee, and be the first to make."""


def prepare() -> None:
    """Set both for this process, and for all that it starts; who has said where compiled code lies keeps that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    cache = os.environ.get("MRL_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "mrl")
    os.environ.setdefault(COMPILED, str(Path(cache) / "torchinductor"))


@contextmanager
def importing() -> Iterator[None]:
    """Nobody looks for garbage meanwhile: what is imported stays, and to look through it takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
