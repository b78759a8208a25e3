"""Engines that sleep stay in main memory: whether all that may lie on this host's units fits into it."""

from mrl.cli.memory_plan import model_parameters
from mrl.config.schema import RunConfig
from mrl.config.unit_rules import KINDS
from mrl.config.units import parse_units
from mrl.errors import ConfigError
from mrl.launch.memory import FLOAT_BYTES, MIB, TORCH_MIB


def check_residents(config: RunConfig, *, host_mib: float, where: str) -> None:
    """Raises ConfigError when an engine of every policy on every unit that it fits is more than the host holds.

    Each is a process with its weights once: one that sleeps has no second copy, and no cache.
    """
    units = [unit for unit in parse_units(config.allocation.units, where=where) if not unit.host]
    wanted = {
        name: sum(unit.kind == KINDS[config.policies[name].device] for unit in units)
        * (TORCH_MIB + FLOAT_BYTES * model_parameters(config, name) / MIB)
        for name in config.learning
    }
    if sum(wanted.values()) > host_mib:
        raise ConfigError(
            'allocation.residency = "sleep": engines of all policies on all units do not fit into main memory',
            where=where,
            got=", ".join(f"{name} {mib:.0f} MiB" for name, mib in wanted.items()),
            wanted=f"at most {host_mib:.0f} MiB in all",
            cure='residency = "stop", or fewer units',
        )
