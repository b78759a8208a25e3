"""One setting, simulated: from policies, sites, shards and a rate to what the daemons held and how long things took."""

import gc
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from exchange_simulation.crowd import (
    BATCH_RECORDS,
    PROMPTS_PER_POLICY,
    Client,
    Forwarder,
    Policy,
    Tally,
    connect,
)
from exchange_simulation.events import Events
from exchange_simulation.station import MIB, Costs, Station

MIN_PROMPTS = 1024
WARM_SHARE = 0.25
"""Of the simulated time, before anything is counted."""

LOSSES = ("dropped", "refused/stale", "refused/void", "refused/foreign", "refused/too_large", "refused/invalid")
"""Ends of the names of what clients count, for records that nobody will have."""

Topology = Literal["one site", "central", "forwarded"]
"""Everything on one site; sites that all use the daemons of the first; or daemons at every site, with forwarders."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What to simulate."""

    policies: int
    records_per_s: int
    """Of all policies together."""
    shards: int = 1
    """Daemons per site that has any."""
    sites: int = 1
    topology: Topology = "one site"
    simulated_s: float = 4.0

    @property
    def daemons(self) -> int:
        """Of all sites."""
        return self.shards * (1 if self.topology == "central" else self.sites)

    @property
    def title(self) -> str:
        """In a few words."""
        where = "" if self.sites == 1 else f", {self.sites} sites {self.topology}"
        return (
            f"{self.policies} policies, {self.records_per_s:,}/s, {self.shards} shard{'s' * (self.shards > 1)}{where}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out; rates and times are those after the warm-up."""

    setting: Setting
    stored_per_s: float
    """What the logs took of the policies themselves; what forwarders bring counts no second time."""
    delivered_per_s: float
    held_mib: tuple[float, float]
    """Median and highest of any daemon."""
    budget_mib: float
    latency_ms: tuple[float, float]
    """p50 and p99 from the publishing of a record to its arrival at one who was waiting for it."""
    age_versions: tuple[float, float]
    """Mean and p99 of what was delivered."""
    evicted: int
    lost: int
    """Refused, or dropped by a client that could not get rid of them."""
    resent: int
    """Copies of what was not acknowledged in time: refused too, and no loss."""
    busy: float
    """Share of the time in which the busiest daemon worked."""
    behind_s: float
    """What the busiest daemon has not got to at the end, in seconds of its work."""
    remote_mib_s: float
    """Between sites."""
    stat_ms: float
    """What the account of one daemon took to make and to encode, on this machine."""
    core_us: dict[str, float] = field(default_factory=dict)
    """Processor time that the real core took on this machine, by kind of work."""
    took_s: float = 0.0
    """Processor time of the simulation."""


class World:
    """Daemons and everybody who speaks to them."""

    def __init__(self, setting: Setting, costs: Costs, budget_mib: int, seed: int) -> None:
        self.events, self.tally = Events(), Tally()
        names = [f"p{number:04d}" for number in range(setting.policies)]
        num_served = 1 if setting.topology == "central" else setting.sites
        self.sites = [
            [
                Station(self.events, costs, name=f"{site}-{shard}", budget_bytes=budget_mib * MIB)
                for shard in range(setting.shards)
            ]
            for site in range(num_served)
        ]
        self.stations = [station for site in self.sites for station in site]
        self.clients = [self._join(setting, name, number, seed) for number, name in enumerate(names)]
        self.forwarders = [
            Forwarder(self.events, site, names[site :: setting.sites], self.sites)
            for site in range(setting.sites if setting.topology == "forwarded" else 0)
        ]

    def _join(self, setting: Setting, name: str, number: int, seed: int) -> Client:
        batch_s = BATCH_RECORDS * setting.policies / setting.records_per_s
        num_prompts = max(MIN_PROMPTS, PROMPTS_PER_POLICY * setting.policies)
        policy = Policy(self.events, self.tally, name, batch_s=batch_s, num_prompts=num_prompts, seed=seed)
        site = number % setting.sites
        is_remote = setting.topology == "central" and site > 0
        there = self.sites[0 if setting.topology == "central" else site]
        policy.exchange = connect(self.events, there, f"learner/{name}", name, policy.heard, is_remote=is_remote)
        return policy.exchange

    def forget_the_past(self) -> Counter[str]:
        """The warm-up is over: count anew. Returns what the clients had counted."""
        self.tally.clear()
        for station in self.stations:
            station.clear()
        return self.counts()

    def counts(self) -> Counter[str]:
        """Of the policies' own clients; forwarders add what became of second copies under other names."""
        total: Counter[str] = Counter()
        for client in self.clients:
            total.update(client.counts)
        for forwarder in self.forwarders:
            for client in forwarder.clients:
                total.update({f"forwarded {key}": number for key, number in client.counts.items()})
        return total


def simulate(setting: Setting, costs: Costs, *, budget_mib: int, seed: int = 1) -> Outcome:
    """Let it happen."""
    gc.collect()  # of the world before
    gc.disable()  # hardly anything here goes before its end, and to look for it takes longer than all else
    try:
        return _simulate(setting, costs, budget_mib, seed)
    finally:
        gc.enable()


def _simulate(setting: Setting, costs: Costs, budget_mib: int, seed: int) -> Outcome:
    began_s = time.process_time()
    world = World(setting, costs, budget_mib, seed)
    world.events.run_until(WARM_SHARE * setting.simulated_s)
    before = world.forget_the_past()
    world.events.run_until(setting.simulated_s)
    counts = world.counts() - before
    measured_s = (1 - WARM_SHARE) * setting.simulated_s
    ages, latencies_ms = world.tally.ages_versions, [1e3 * value for value in world.tally.latencies_s]
    held_mib = [num_bytes / MIB for station in world.stations for num_bytes in station.held_bytes]
    busiest = max(world.stations, key=lambda station: station.busy_s)
    return Outcome(
        setting,
        stored_per_s=counts["stored"] / measured_s,
        delivered_per_s=len(ages) / measured_s,
        held_mib=(_quantile(held_mib, 0.5), max(held_mib)),
        budget_mib=budget_mib,
        latency_ms=(_quantile(latencies_ms, 0.5), _quantile(latencies_ms, 0.99)),
        age_versions=(float(np.mean(ages)) if ages else math.nan, _quantile(ages, 0.99)),
        evicted=sum(sum(held.evicted.values()) for one in world.stations for held in one.core.shelf.policies.values()),
        lost=sum(number for key, number in counts.items() if key.endswith(LOSSES)),
        resent=sum(number for key, number in counts.items() if key.endswith("refused/duplicate")),
        busy=busiest.busy_s / measured_s,
        behind_s=max(station.behind_s for station in world.stations),
        remote_mib_s=sum(station.num_bytes_remote for station in world.stations) / MIB / measured_s,
        stat_ms=busiest.stat_ms(),
        core_us=_core_us(world.stations),
        took_s=time.process_time() - began_s,
    )


def _core_us(stations: Sequence[Station]) -> dict[str, float]:
    took_s, items = Counter[str](), Counter[str]()
    for station in stations:
        took_s.update(station.core_s)
        items.update(station.core_items)
    return {kind: 1e6 * took_s[kind] / number for kind, number in sorted(items.items()) if number}


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else math.nan
