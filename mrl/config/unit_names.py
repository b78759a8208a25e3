"""Units of capacity by name: "gpu:0", "cpu:0-3", "node2/gpu:0,1". A unit runs one engine of one policy at a time."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mrl.errors import ConfigError

MAX_DEVICE = 4095
_FORM = re.compile(r"(?:(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)/)?(?P<kind>cpu|gpu):(?P<devices>\d+(?:[-,]\d+)*)")


@dataclass(frozen=True, slots=True)
class Unit:
    """Devices of one kind on one host, which are granted and revoked together."""

    name: str
    host: str
    """Name of the host; empty for the first host of the run."""
    kind: Literal["cpu", "gpu"]
    devices: tuple[int, ...]
    """Numbers of cores; of GPUs their places among those that the host shows."""


def parse_units(names: Sequence[str]) -> tuple[Unit, ...]:
    """Return the units of these names. Raises ConfigError for an invalid name, and for a device in two units."""
    units = tuple(_parse(name) for name in names)
    owners: dict[tuple[str, str, int], str] = {}
    for unit in units:
        for device in unit.devices:
            other = owners.setdefault((unit.host, unit.kind, device), unit.name)
            if other != unit.name or names.count(unit.name) > 1:
                raise ConfigError(
                    f"allocation.units: {unit.kind} {device} is in two units",
                    got=f"{other}, {unit.name}",
                    wanted="each device in only one unit",
                )
    return units


def _parse(name: str) -> Unit:
    form = _FORM.fullmatch(name)
    devices = _devices(form["devices"]) if form else ()
    if not form or not devices:
        raise ConfigError(
            "allocation.units: not a valid unit",
            got=name,
            wanted='"gpu:0", "cpu:0-3" or "HOST/gpu:0,1", each device once, device numbers up to ' + str(MAX_DEVICE),
        )
    return Unit(name, form["host"] or "", "cpu" if form["kind"] == "cpu" else "gpu", devices)


def _devices(text: str) -> tuple[int, ...]:
    """Return the numbers of "0-3,8" in order; none where the text has none, one twice, or one too large."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if "-" in last or int(first) > MAX_DEVICE or int(last or 0) > MAX_DEVICE:
            return ()
        found += range(int(first), int(last if dash else first) + 1)
    return tuple(sorted(found)) if len(set(found)) == len(found) else ()
