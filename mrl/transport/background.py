"""A thread that owns a client socket, so that the thread that computes never waits for the network."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from mrl.transport.client_socket import ClientSocket


class BackgroundClient:
    """Sends posted messages and hands over received ones, on a thread of its own."""

    def __init__(
        self,
        client: ClientSocket,
        *,
        on_message: Callable[[bytes], None],
        on_tick: Callable[[float], None] | None = None,
        max_queued_bytes: int = 32 * 1024 * 1024,
        name: str = "client",
        tick_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_message(body)` and `on_tick(now_s)` run on the thread; they may call `post` and `request_reconnect`."""
        self._client, self._on_message, self._on_tick = client, on_message, on_tick
        self._max_queued_bytes, self._tick_s, self._clock = max_queued_bytes, tick_s, clock
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = self._num_stale = 0
        self._reconnect = False
        self._close_at_s: float | None = None
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, body: bytes) -> bool:
        """Queue `body` and return at once; False when it does not fit or the client is closed. Safe from any thread."""
        too_large = len(body) > self._client.max_message_bytes
        with self._lock:
            full = self._queued_bytes + len(body) > self._max_queued_bytes
            if too_large or full or self._close_at_s is not None:
                return False
            self._queue.append(body)
            self._queued_bytes += len(body)
            self._wake()
        return True

    def request_reconnect(self) -> None:
        """Have the thread look up the server's address again and connect anew."""
        with self._lock:
            self._reconnect = True
            self._wake()

    def restart(self) -> None:
        """Reconnect as `request_reconnect`, and drop queued messages: callers that await an answer post again."""
        with self._lock:
            self._reconnect, self._num_stale, self._queued_bytes = True, len(self._queue), 0
            self._wake()

    def close(self, timeout_s: float) -> None:
        """Send queued messages for at most `timeout_s`, then end the thread and the link."""
        with self._lock:
            if self._close_at_s is None:
                self._close_at_s = self._clock() + timeout_s
                self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s + 2.0)

    def _wake(self) -> None:
        """Wake the thread. Called with the lock held, so that the pipe is not yet closed."""
        if self._wake_writer >= 0:
            try:
                os.write(self._wake_writer, b"\0")
            except BlockingIOError:
                return

    def _run(self) -> None:
        try:
            while not self._finished():
                self._round()
            if self._close_at_s is not None:
                self._client.close(linger_s=max(0.0, self._close_at_s - self._clock()))
        finally:
            with self._lock:
                self._close_at_s = self._close_at_s or self._clock()
                writer, self._wake_writer = self._wake_writer, -1
            os.close(self._wake_reader)
            os.close(writer)
            self._client.close()

    def _round(self) -> None:
        with self._lock:
            reconnect, self._reconnect = self._reconnect, False
            while self._num_stale:
                self._drop_first()
        if reconnect:
            self._client.reconnect()
        self._send_queued()
        self._client.wait(self._tick_s, wake_fd=self._wake_reader, until_sendable=bool(self._queue))
        self._swallow_wakes()
        for body in self._client.receive(0.0):
            self._on_message(body)
        if self._on_tick is not None:
            self._on_tick(self._clock())

    def _finished(self) -> bool:
        if self._close_at_s is None:
            return False
        return not self._queue or self._clock() >= self._close_at_s

    def _send_queued(self) -> None:
        # Messages posted after a requested reconnect belong on the new link.
        while self._queue and not self._reconnect:
            if not self._client.send(self._queue[0]):
                return
            with self._lock:
                self._drop_first()

    def _drop_first(self) -> None:
        body = self._queue.popleft()
        if self._num_stale:
            self._num_stale -= 1  # `restart` has already uncounted its bytes
        else:
            self._queued_bytes -= len(body)

    def _swallow_wakes(self) -> None:
        try:
            while len(os.read(self._wake_reader, 4096)) == 4096:
                pass
        except BlockingIOError:
            return
