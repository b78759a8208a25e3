"""Tell a person what a check before a run waits for, where that takes long."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TELL_EVERY_S = 10.0


@contextmanager
def wait_notice(what: str) -> Iterator[None]:
    """During the block, print to stderr every TELL_EVERY_S that `what` is awaited, and for how long so far."""
    begin_s, is_over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_over.wait(TELL_EVERY_S):
            print(f"waiting for {what} ({time.monotonic() - begin_s:.0f} s so far)", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, name="told-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
