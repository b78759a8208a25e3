"""Mistakes in the real code that the witness has to find, each as somebody could make it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

PLANTED: dict[str, Callable[[], object]] = {}


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Put the mistake of this name into the code; "" is none."""
    yield
