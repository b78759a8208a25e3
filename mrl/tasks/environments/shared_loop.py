"""One event loop for all connections of an environment process, in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Found = TypeVar("Found")


class SharedLoop:
    """Where the threads of episodes have their network done."""

    _lock = threading.Lock()
    _loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def run(cls, work: Coroutine[Any, Any, Found]) -> Found:
        """What `work` gives. The pool ends an episode that waits too long, so this has no bound of its own."""
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                threading.Thread(target=cls._loop.run_forever, name="network", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, cls._loop).result()
