"""Units of a run's hosts: the units of a host, its GPUs outside of units, and the environment of workers on units."""

import os
from collections.abc import Sequence

from mrl.config.rules.unit_rules import are_in_turns
from mrl.config.schema import RunConfig
from mrl.config.unit_names import Unit, parse_units
from mrl.errors import ConfigError

UNIT, UNIT_EPOCH, UNIT_RUN, UNIT_POLICY = "MRL_UNIT", "MRL_UNIT_EPOCH", "MRL_UNIT_RUN", "MRL_UNIT_POLICY"
"""Environment variables of a worker on a unit and of every process that it starts; the unit's node finds all of them by
these variables."""
KEEPS_ENVIRONMENT = "SPT_NOENV"
"""Environment variable that keeps `setproctitle` from writing the title over the environment, which the node reads."""
UNIT_LINE = "MRL_UNIT_LINE"
"""Environment variable set where the worker's engine may sleep: the worker's stdin is then the socket to its node."""


def units_of(config: RunConfig, host: str, *, is_first: bool) -> tuple[Unit, ...]:
    """Return the units of one host; units without a host's name are on the first host."""
    units = parse_units(config.allocation.units)
    return tuple(unit for unit in units if unit.host == host or (is_first and not unit.host))


def check_cores(units: Sequence[Unit], *, where: str) -> None:
    """Raises ConfigError when one of `units`, all of this host, has a core that the host does not have."""
    here = os.sched_getaffinity(0)
    for unit in units:
        lacking = [core for core in unit.devices if unit.kind == "cpu" and core not in here]
        if lacking:
            raise ConfigError(
                f"allocation.units: this host has no core {lacking[0]}",
                where=where,
                got=unit.name,
                wanted="cores " + ", ".join(map(str, sorted(here))),
            )


def not_leased(config: RunConfig, gpus: Sequence[str], host: str, *, is_first: bool) -> list[str]:
    """Return the GPUs of a host that learners may have: those outside of units, or all where they are used in turns.

    Raises ConfigError for a unit of GPUs that the host does not show.
    """
    here = [unit for unit in units_of(config, host, is_first=is_first) if unit.kind == "gpu"]
    leased = {device: unit.name for unit in here for device in unit.devices}
    for device, unit_name in leased.items():
        if device >= len(gpus):
            raise ConfigError(
                f"allocation.units: only {len(gpus)} GPUs are visible on this host",
                got=unit_name,
                wanted=f"GPU numbers below {len(gpus)}",
            )
    shared = are_in_turns(config)
    return [gpu for number, gpu in enumerate(gpus) if shared or number not in leased]


def unit_hosts(config: RunConfig, hosts: Sequence[str]) -> frozenset[str]:
    """Return the hosts named by units. Raises ConfigError for a unit of a host that the run does not have."""
    for unit in parse_units(config.allocation.units):
        if unit.host and unit.host not in hosts:
            raise ConfigError(
                "allocation.units: the unit's host is not part of the run",
                got=unit.name,
                wanted=f"one of {', '.join(hosts)}" if hosts else "no host name, as the run is on one host",
            )
    return frozenset(unit.host for unit in parse_units(config.allocation.units) if unit.host)
