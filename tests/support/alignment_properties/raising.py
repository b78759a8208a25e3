"""Checks that nothing is raised."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def never_raises(what: object) -> Iterator[None]:
    """Whatever is raised inside fails the check."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {what}: {error}") from error
