"""Requests that a worker's engine sleep and wake, for engines on GPU units."""

from typing import Protocol


class SleepRequests(Protocol):
    """Requests that one engine sleep and wake, and the worker's answers."""

    def is_due(self) -> bool:
        """Whether the worker is to sleep."""

    def refuse(self) -> None:
        """Answer that the engine cannot sleep; the worker is then told to end."""

    def sleep(self) -> bool:
        """Answer that the engine sleeps, and wait until it is to wake up; False when the worker is to end."""

    def awake(self) -> None:
        """Answer that the engine can sample again."""
