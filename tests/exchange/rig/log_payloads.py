"""Entries of the log that come in one part."""

from collections.abc import Iterable


def whole(payloads: Iterable[bytes]) -> list[list[bytes]]:
    """Each payload as the only part of its entry."""
    return [[payload] for payload in payloads]
