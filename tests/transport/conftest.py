"""Keys and sockets on loopback, closed after every test."""

import time
from collections.abc import Callable, Iterator

import pytest

from mrl.transport.client_socket import ClientSocket
from mrl.transport.grants import Grant, grant_of
from mrl.transport.keys import ClientKeys, RunKeys, create_keys, load_client_keys
from mrl.transport.server import ServerSocket

GRANTS = tuple(Grant(role, policy) for role in ("learner", "worker") for policy in ("qwen", "llama"))


@pytest.fixture
def keys(tmp_path) -> RunKeys:
    """The keys of a run with two policies."""
    return create_keys(tmp_path / "keys", GRANTS)


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
        opened.append(ServerSocket(keys, **{"host": "127.0.0.1"} | options))
        return opened[-1]

    return make


@pytest.fixture
def make_client(keys, opened) -> Callable[..., ClientSocket]:
    """Makes clients of an address, or of a function that looks it up."""

    def make(address, identity="worker/qwen/0", with_keys: ClientKeys | None = None, **options) -> ClientSocket:
        resolve = address if callable(address) else lambda: address
        own = with_keys or load_client_keys(keys.folder, grant_of(identity))
        opened.append(ClientSocket(own, resolve, identity=identity, **options))
        return opened[-1]

    return make


def until(what: Callable[[], object], *, within_s: float = 120.0) -> object:
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
