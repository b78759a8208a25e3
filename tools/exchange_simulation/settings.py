"""What is simulated: one thing grows at a time."""

from collections.abc import Sequence

from exchange_simulation.trial import Setting, Topology

RECORDS = {10: 20_000, 100: 24_000, 1000: 30_000}
"""How many records a setting simulates, by its policies."""
SHARDED_RECORDS = 40_000
QUICK_RECORDS = 4_000
RATES = (1_000, 3_000, 10_000, 30_000)
POLICIES = (10, 100, 1000)
SHARDS = (4, 8, 16, 32)
MOST_POLICIES, HIGHEST_RATE = 1000, 100_000
SITES: Sequence[tuple[Topology, int]] = (("central", 1), ("forwarded", 1), ("central", 4), ("forwarded", 4))


def setting(
    policies: int,
    records_per_s: int,
    shards: int = 1,
    *,
    num_records: int,
    sites: int = 1,
    topology: Topology = "one site",
) -> Setting:
    """One that simulates as many seconds as so many records take."""
    return Setting(policies, records_per_s, shards, sites, topology, num_records / records_per_s)


def rates() -> list[Setting]:
    """One daemon, more and more records."""
    return [setting(100, rate, num_records=RECORDS[100]) for rate in RATES]


def policies() -> list[Setting]:
    """One daemon, more and more policies at one rate."""
    return [setting(number, 10_000, num_records=RECORDS[number]) for number in POLICIES]


def shards() -> list[Setting]:
    """The most policies at the highest rate, on more and more daemons."""
    return [setting(MOST_POLICIES, HIGHEST_RATE, number, num_records=SHARDED_RECORDS) for number in SHARDS]


def sites() -> list[Setting]:
    """Four sites that share the daemons of one, or have their own and forward."""
    return [
        setting(100, 10_000, number, num_records=RECORDS[100], sites=4, topology=topology) for topology, number in SITES
    ]


def quick() -> list[Setting]:
    """A little of each kind, in seconds."""
    return [
        setting(10, 1_000, num_records=QUICK_RECORDS),
        setting(40, 10_000, 2, num_records=QUICK_RECORDS),
        setting(40, 4_000, num_records=QUICK_RECORDS, sites=2, topology="forwarded"),
    ]


def full() -> list[Setting]:
    """The whole sweep."""
    return list(dict.fromkeys([*rates(), *policies(), *shards(), *sites()]))
