"""Who tells a worker to sleep, where engines on GPU units may."""

from typing import Protocol


class Rest(Protocol):
    """Who tells a worker to sleep, and wakes it up."""

    def is_due(self) -> bool:
        """Whether the worker is to sleep."""

    def refuse(self) -> None:
        """The engine cannot sleep; the worker is told to end."""

    def sleep(self) -> bool:
        """Until the worker is woken up; False when it is to end. The engine is asleep."""

    def awake(self) -> None:
        """The engine can sample again."""
