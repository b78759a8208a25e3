"""Meeting of the ranks of several hosts, once for every life of the learner.

The first rank opens a store at a free port of its host's address and writes the address to `endpoints/` of the run
folder, as every listener of a run does. The other ranks read it there, and take their seats. A seat is taken once: a
rank that finds its seat taken is of a later life than the store, and ends the store's life for all ranks still in it.
So ranks of different lives are never in one group.

torchrun's own rendezvous over several hosts is not used. Its store listens on all addresses of a host, without
authentication, and its port has to be known beforehand.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import msgspec
import structlog
import torch
import torch.distributed as dist

from mrl.errors import ConfigError, PeerLost
from mrl.learner.ranks.host_board import OVER
from mrl.learner.ranks.own_address import bind_collectives, own_address
from mrl.learner.ranks.rank_place import RankPlace
from mrl.models.tensor_broadcast import open_store, store_at
from mrl.transport.endpoints import port_of, publish_endpoint, read_endpoint

POLL_S = 0.1
STORE_S = 10.0
"""Seconds for one question to the store."""
LIFE = "life"
"""Key of the store: the name of the life whose ranks meet there."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """Place at which a learner's ranks look for each other, and the bounds of their waits."""

    endpoints: Path
    """Folder of endpoint files that all hosts see."""
    name: str
    """Name of the endpoint file."""
    bound_s: float
    """Seconds until all ranks are there."""
    lost_s: float
    """Seconds without a word after which a rank is lost, once all have met."""


class _Guest(msgspec.Struct, frozen=True):
    """Entry of a rank about itself, made as it takes its seat."""

    host: str
    address: str
    torch: str


@dataclass(frozen=True, slots=True)
class RankRendezvous:
    """Meeting of the ranks of one life, at a store."""

    address: str
    """Address of the store, "tcp://HOST:PORT"."""
    life: str
    store: dist.Store
    """Client of the store, which the first rank holds as long as it lives."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Host name -> address."""

    def keys(self, room: str) -> dist.Store:
        """Return a part of the store for one purpose."""
        return dist.PrefixStore(f"{self.life}/{room}", self.store)

    def another(self, room: str) -> dist.Store:
        """Return a part over a new connection, so that its questions wait for no others. Raises RuntimeError."""
        return dist.PrefixStore(f"{self.life}/{room}", _connect(self.address))


class _NotThisLifeError(Exception):
    """The life that this rank came to is over, or its store is gone; there will be another life."""


def meet(place: RankPlace, point: RendezvousPoint) -> RankRendezvous:
    """Wait until all ranks of one life are there; bind the collectives of this process to the host's interface.

    Raises PeerLost naming the ranks that have not come within the bound, ConfigError where hosts have other versions
    of torch or this one has no address.
    """
    here, interface = own_address([host for host in place.hosts if host != place.hosts[place.host]])
    bind_collectives(interface)
    deadline_s = time.monotonic() + point.bound_s
    of_life, of_store = "", f"{place.told(0)} has not published its address"
    while time.monotonic() < deadline_s:
        try:
            met = _open(here, point) if place.rank == 0 else _find(point)
            if met is not None:
                _take_seat(met, place, here)
                return _await_all(met, place, point, deadline_s)
        except _NotThisLifeError as error:
            of_life = str(error)
        except RuntimeError as error:  # torch's, of a store that is gone
            of_store = str(error).partition("\n")[0].partition(". ")[0][:300]
        time.sleep(POLL_S)
    raise PeerLost(f"ranks of {point.name} did not connect within {point.bound_s:g} s: {of_life or of_store}")


def _open(here: str, point: RendezvousPoint) -> RankRendezvous:
    store = open_store(here)
    store.set_timeout(timedelta(seconds=STORE_S))
    life = secrets.token_hex(8)
    store.set(LIFE, life)
    address = f"tcp://[{here}]:{store.port}" if ":" in here else f"tcp://{here}:{store.port}"
    publish_endpoint(point.endpoints, point.name, address)
    return RankRendezvous(address, life, store)


def _find(point: RendezvousPoint) -> RankRendezvous | None:
    address = read_endpoint(point.endpoints, point.name)
    if address is None:
        return None
    store = _connect(address)
    return RankRendezvous(address, store.get(LIFE).decode(), store)


def _connect(address: str) -> dist.TCPStore:
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return store_at(host, port_of(address), patience_s=STORE_S)


def _take_seat(met: RankRendezvous, place: RankPlace, here: str) -> None:
    seats = met.keys("seats")
    if seats.add(f"taken/{place.rank}", 1) > 1:
        met.keys("board").set(OVER, f"{place.told(place.rank)} was restarted")
        raise _NotThisLifeError(f"{place.told(0)} is still in an earlier attempt")
    guest = _Guest(place.host_of(place.rank), here, str(torch.__version__))
    seats.set(f"guest/{place.rank}", msgspec.json.encode(guest).decode())


def _await_all(met: RankRendezvous, place: RankPlace, point: RendezvousPoint, deadline_s: float) -> RankRendezvous:
    seats, board, names = met.keys("seats"), met.keys("board"), ""
    try:
        while missing := [rank for rank in range(place.size) if not seats.check([f"guest/{rank}"])]:
            names = ", ".join(place.told(rank) for rank in missing)
            if board.check([OVER]):
                raise _NotThisLifeError(board.get(OVER).decode(errors="replace"))
            if time.monotonic() > deadline_s:
                raise PeerLost(f"ranks of {point.name} did not connect at {met.address} within {point.bound_s:g} s: "
                               f"{names} missing")  # fmt: skip
            time.sleep(POLL_S)
    except RuntimeError as error:  # the first rank, which holds the store, may give up a moment earlier
        raise _NotThisLifeError(f"{names} did not connect before {place.told(0)} left") if names else error from None
    guests = [msgspec.json.decode(seats.get(f"guest/{rank}"), type=_Guest) for rank in range(place.size)]
    _check_alike(guests, point.name)
    log.info("all ranks connected", address=met.address, hosts=list(place.hosts), ranks=place.size)
    return replace(met, addresses={guest.host: guest.address for guest in guests})


def _check_alike(guests: Sequence[_Guest], name: str) -> None:
    first = guests[0]
    for guest in guests:
        if guest.torch != first.torch:
            raise ConfigError(
                f"{name}: hosts of one learner have different versions of torch",
                got=f"{first.torch} on host {first.host}, {guest.torch} on host {guest.host}",
                wanted="the same version on all hosts",
                cure="install the same environment on all hosts",
            )
