"""Keys and sockets on loopback, closed after every test."""

import time
from collections.abc import Callable, Iterator

import pytest

from mrl.transport.client import ClientSocket
from mrl.transport.keys import RunKeys, create_keys
from mrl.transport.server import ServerSocket


@pytest.fixture(scope="session")
def keys(tmp_path_factory) -> RunKeys:
    """One run's keys."""
    return create_keys(tmp_path_factory.mktemp("run") / "keys")


@pytest.fixture
def opened() -> Iterator[list]:
    """Things to close at the end of the test, last first."""
    things: list = []
    yield things
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def make_server(keys, opened) -> Callable[..., ServerSocket]:
    """Makes servers on free loopback ports."""

    def make(**options) -> ServerSocket:
        opened.append(ServerSocket(keys, **options))
        return opened[-1]

    return make


@pytest.fixture
def make_client(keys, opened) -> Callable[..., ClientSocket]:
    """Makes clients of an address, or of a function that looks it up."""

    def make(address, identity="client", keys=keys, **options) -> ClientSocket:
        resolve = address if callable(address) else lambda: address
        opened.append(ClientSocket(keys, resolve, identity=identity, **options))
        return opened[-1]

    return make


def until(what: Callable[[], object], *, within_s: float = 10.0) -> object:
    """Call `what` until it returns something true, and return that; fail when the time is up."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if found := what():
            return found
    raise AssertionError(f"nothing came within {within_s} s")


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., object]:
    """The bounded wait."""
    return until
