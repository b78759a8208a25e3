"""One event loop for all connections of an environment process, in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, TypeVar

Found = TypeVar("Found")
SLICE_S = 0.5


class SharedLoop:
    """The event loop in which the threads of episodes run their network calls."""

    _lock = threading.Lock()
    _loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def run(cls, work: Coroutine[Any, Any, Found]) -> Found:
        """Run `work` and return its result. It has no bound of its own: the pool ends an episode that waits too long.

        The wait is cut in slices: an episode is broken off by an exception in its thread, which one long wait would
        delay.
        """
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                threading.Thread(target=cls._loop.run_forever, name="network", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(work, cls._loop)
        try:
            while True:
                with suppress(FutureTimeout):
                    return future.result(SLICE_S)
        finally:
            future.cancel()
