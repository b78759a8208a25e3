"""The thread that commits, one transaction at a time, so that the daemon's loop never waits for the disk."""

import os
import threading
import time
from contextlib import suppress

from mrl.errors import DiskBroken
from mrl.exchange.store import Store
from mrl.exchange.transaction import Transaction


class Writer:
    """The thread, which owns the store while it runs. `wake_fd` is readable when a transaction has ended."""

    def __init__(self, store: Store) -> None:
        self.num_commits = 0
        self.commit_s = 0.0
        """Seconds that transactions took, all together."""
        self.failure = ""
        """Why the thread ended before it was closed, with the state of the file unknown; else empty."""
        self._store = store
        self._changed = threading.Condition()
        self._transaction: Transaction | None = None
        self._done: str | None = None
        self._is_closing = False
        self.wake_fd, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def post(self, transaction: Transaction) -> None:
        """Begin a transaction; there is one at a time."""
        with self._changed:
            self._transaction, self._done = transaction, None
            self._changed.notify()

    def done(self) -> str | None:
        """Return the result of the transaction, once: "" or why it failed. None while there is none to tell."""
        with self._changed:
            done, self._done = self._done, None
        if done is not None:
            with suppress(BlockingIOError):
                os.read(self.wake_fd, 64)
        return done

    def close(self, timeout_s: float) -> bool:
        """End the thread after the transaction under way; `done` still tells its result.

        Returns False after `timeout_s`.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (transaction := self._next()) is not None:
                begin_s = time.monotonic()
                failure = self._store.commit(transaction)
                self.commit_s += time.monotonic() - begin_s
                self.num_commits += not failure
                self._say(failure)
                self._store.checkpoint(is_idle=False)
        except DiskBroken as error:
            self.failure = str(error)
            os.write(self._wake, b"\0")

    def _next(self) -> Transaction | None:
        """Return the next transaction, or None at the end. While there is none, copy the write-ahead log's pages."""
        with self._changed:
            is_idle = self._transaction is None
        if is_idle:
            self._store.checkpoint(is_idle=True)
        with self._changed:
            self._changed.wait_for(lambda: self._transaction is not None or self._is_closing)
            transaction, self._transaction = self._transaction, None
            return transaction

    def _say(self, failure: str) -> None:
        with self._changed:
            self._done = failure
        os.write(self._wake, b"\0")
