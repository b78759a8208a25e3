"""The address and interface by which other hosts reach this one."""

import socket
from types import SimpleNamespace

import pytest

from mrl.errors import ConfigError
from mrl.learner.ranks import own_address as module
from mrl.learner.ranks.own_address import GLOO, NCCL, bind_collectives, own_address
from mrl.transport.endpoints import ADDRESS

INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
NAMES = {"me": "10.0.0.1", "debian": "127.0.1.1", "strange": "10.9.9.9", "other": "10.1.0.2"}


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three interfaces, and names; the way to "other" begins at the last of them."""
    found = {name: [SimpleNamespace(family=socket.AF_INET, address=one)] for name, one in INTERFACES.items()}
    monkeypatch.setattr(module.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(module, "_addresses_of", lambda name: [NAMES.get(name, name)] if name else [])
    monkeypatch.setattr(module, "_towards", lambda other: ["10.1.0.1"] if other == "other" else [])
    monkeypatch.delenv(ADDRESS, raising=False)


@pytest.mark.parametrize(
    ("name", "address", "interface"),
    [("me", "10.0.0.1", "eth0"), ("debian", "10.1.0.1", "ib0"), ("127.0.0.1", "10.1.0.1", "ib0")],
)
def test_the_interface_of_the_hosts_address(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str, interface: str
) -> None:
    """Of its name, or, where that leads to loopback, of the way to another host."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert own_address(["other"]) == (address, interface)


def test_an_address_that_is_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback too, where all hosts are on one machine."""
    monkeypatch.setenv(ADDRESS, "10.1.0.1")
    assert own_address([]) == ("10.1.0.1", "ib0")
    monkeypatch.setenv(ADDRESS, "127.0.0.1")
    assert own_address([]) == ("127.0.0.1", "lo")


def test_an_address_that_no_interface_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what there is, and the way to name one."""
    monkeypatch.setenv(ADDRESS, "strange")
    with pytest.raises(
        ConfigError, match=r"none of its network interfaces.* got 'strange: 10\.9\.9\.9'; wanted one of 10\.0\.0\.1, "
    ):
        own_address([])


def test_gloo_is_bound_and_the_users_words_for_nccl_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "lo")
    monkeypatch.setenv(NCCL, "ib")
    bind_collectives("eth0")
    assert (module.os.environ[GLOO], module.os.environ[NCCL]) == ("eth0", "ib")
    monkeypatch.delenv(NCCL)
    bind_collectives("eth0")
    assert module.os.environ[NCCL] == "=eth0"
