"""The address by which the other hosts of a learner reach this one, and the interface that has it.

gloo and NCCL are bound to that interface. Left alone, gloo takes the one that the host's own name leads to, which is
loopback on many systems, and NCCL takes all that it finds.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil

from mrl.errors import ConfigError
from mrl.transport.endpoints import HOST, reachable_host

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
ANY_PORT = 9
"""Port to which nothing is sent: the kernel is only asked for the route."""


def own_address(others: Sequence[str]) -> tuple[str, str]:
    """Return address and interface of this host, as the `others` (names or addresses) reach it.

    Where this host's name leads to loopback, take the address from which one of the others is reached. Raises
    ConfigError when no interface has it.
    """
    named = reachable_host("*")
    interfaces = _interfaces()
    candidates = [*_addresses_of(named), *(found for other in others for found in _towards(other))]
    usable = [address for address in candidates if address in interfaces]
    if not usable:
        raise ConfigError(
            "--hosts: the address of this host belongs to none of its network interfaces",
            where=f"host {os.environ.get(HOST, '')}",
            got=f"{named}: {', '.join(candidates) or 'the name does not resolve'}",
            wanted="one of " + ", ".join(sorted(interfaces)),
            cure="give addresses, for example --hosts a=10.0.0.1,b=10.0.0.2",
        )
    address = next((one for one in usable if not ipaddress.ip_address(one).is_loopback), usable[0])
    return address, interfaces[address]


def bind_collectives(interface: str) -> None:
    """Bind process groups that are made from now on to one interface; a user's own setting for NCCL stays."""
    os.environ[GLOO] = interface
    os.environ.setdefault(NCCL, f"={interface}")  # without "=" NCCL takes it for the beginning of a name


def _interfaces() -> dict[str, str]:
    """Return address -> interface."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {one.address: name for name, found in psutil.net_if_addrs().items() for one in found if one.family in kinds}


def _addresses_of(name: str) -> list[str]:
    with suppress(OSError):
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)))
    return []


def _towards(other: str) -> Iterator[str]:
    for address in _addresses_of(other):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, ANY_PORT))
            yield str(probe.getsockname()[0])
