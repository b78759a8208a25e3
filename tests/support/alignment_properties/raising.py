"""A context in which any exception fails the check."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def never_raises(what: object) -> Iterator[None]:
    """Turn every exception inside into an AssertionError that names `what`."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {what}: {error}") from error
