"""Requests that a worker's engine sleep and wake, where engines on GPU units may."""

from typing import Protocol


class SleepRequests(Protocol):
    """The requests, and what the worker answers."""

    def is_due(self) -> bool:
        """Whether the worker is to sleep."""

    def refuse(self) -> None:
        """The engine cannot sleep; the worker is told to end."""

    def sleep(self) -> bool:
        """Until the worker is woken up; False when it is to end. The engine is asleep."""

    def awake(self) -> None:
        """The engine can sample again."""
