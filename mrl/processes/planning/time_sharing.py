"""Devices that learners and engines of policies with `turns` use one after the other, and GPUs that are shared."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.allocation.device_turn import DeviceTurn
from mrl.config.run_folder import RunFolder, local_folder
from mrl.config.schema import RunConfig
from mrl.config.unit_names import parse_units
from mrl.errors import ConfigError
from mrl.processes.planning.unit_workers import UNIT

if TYPE_CHECKING:
    from mrl.processes.planning.plan import ProcessSpec

TURN_DEVICES = "MRL_TURN_DEVICES"
"""Environment variable with the devices that a process has in turns: GPUs as CUDA names them, or the cores of its unit
(of all units for a process on none), or "cpu"."""


def turn_environment(config: RunConfig, spec: "ProcessSpec") -> dict[str, str]:
    """Return the variable that names a process's devices in turns; {} for a process with devices of its own."""
    if not spec.policy or not config.policies[spec.policy].turns:
        return {}
    if config.policies[spec.policy].device == "cuda":
        return {TURN_DEVICES: spec.env.get("CUDA_VISIBLE_DEVICES", "")}
    units = [unit for unit in parse_units(config.allocation.units) if unit.kind == "cpu"]
    cores = [core for unit in units if spec.env.get(UNIT, unit.name) == unit.name for core in unit.devices]
    return {TURN_DEVICES: ",".join(f"core {core}" for core in cores) or "cpu"}


def turn_devices(environment: Mapping[str, str]) -> list[str]:
    """Return the devices that a process with this environment has in turns."""
    return [name for name in environment.get(TURN_DEVICES, "").split(",") if name]


def device_turn(folder: RunFolder, role: str) -> DeviceTurn | None:
    """Return this process's turns on its devices; None where it has its devices for itself."""
    devices = turn_devices(os.environ)
    if not devices:
        return None
    shared: Path = local_folder() or folder.path
    return DeviceTurn(shared / "turns", role, devices)


def check_turns(config: RunConfig, hosts: Sequence[str]) -> None:
    """Raises ConfigError for turns in a run over several hosts: the kernel of one host keeps them."""
    named = [name for name, policy in config.policies.items() if policy.turns]
    if named and len(hosts) > 1:
        raise ConfigError(
            f"policies.{named[0]}.turns: only processes of one host can use a device in turns",
            got=f"{len(hosts)} hosts",
            wanted="a run on one host",
            cure=f"set policies.{named[0]}.turns = false: several hosts can give learner and engines separate devices",
        )


def shared_gpus(processes: "Sequence[ProcessSpec]") -> Iterator[str]:
    """Yield a line for every GPU of this host that several processes of a plan use, at once or in turns.

    Engines on leased units count only with `turns`: otherwise one engine at a time has its unit for itself.
    """
    users: dict[str, list[ProcessSpec]] = {}
    for spec in (one for one in processes if UNIT not in one.env or TURN_DEVICES in one.env):
        for gpu in filter(None, spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",")):
            users.setdefault(gpu, []).append(spec)
    for gpu, specs in users.items():
        if len(specs) > 1:
            names = ", ".join(spec.name for spec in specs)
            beside = [spec.name for spec in specs if TURN_DEVICES not in spec.env]
            holds = "all of them" if len(beside) > len(specs) - 2 else "the largest of them"
            in_turns = holds != "all of them"
            also = f" beside {', '.join(beside)}" if in_turns and beside else ""
            told = f"its memory has to hold {holds}{also}"
            yield f"GPU {gpu} is shared{' in turns' * in_turns} by {names}: {told}"
