"""Types of units: equal kind and unequal speed, such as two models of GPU, or four cores and one."""

from collections.abc import Mapping, Sequence

from mrl.config.nearest_key import nearest
from mrl.config.unit_names import Unit
from mrl.errors import ConfigError


def named_types(named: Mapping[str, Sequence[str]], units: Sequence[Unit]) -> dict[str, str]:
    """Return unit -> its type in `allocation.unit_types`; units without a type are left out.

    named: type -> names of units, and of hosts, which stand for all of their units that are not named themselves.
    Raises ConfigError for a name that is neither, or that has two types.
    """
    types: dict[str, str] = {}
    for unit_type, names in named.items():
        for name in names:
            _check(name, unit_type, types, units)
            types[name] = unit_type
    found = {unit.name: types.get(unit.name) or types.get(unit.host) for unit in units}
    return {unit: unit_type for unit, unit_type in found.items() if unit_type}


def seen_type(unit: Unit, models: Sequence[str]) -> str:
    """Return the type of a unit that has none in the configuration, from the devices that its host sees.

    models: names that the driver gives the unit's devices; empty where they are not known, and for cores.
    """
    model = " + ".join(sorted(set(models))) or unit.kind
    return model if len(unit.devices) == 1 else f"{model} x{len(unit.devices)}"


def _check(name: str, unit_type: str, types: Mapping[str, str], units: Sequence[Unit]) -> None:
    known = {unit.name for unit in units} | {unit.host for unit in units if unit.host}
    if name not in known:
        near = nearest(name, known)
        raise ConfigError(
            f"allocation.unit_types.{unit_type}: neither a unit nor a host with units",
            got=name,
            wanted="a name in allocation.units, or the HOST of one",
            cure=f"did you mean {near!r}?" if near else "",
        )
    if name in types:
        raise ConfigError(
            f"allocation.unit_types: {name} has two types",
            got=f"{types[name]}, {unit_type}",
            wanted="one type for each unit or host",
        )
