"""Workers that live on leased units: which units a host has, and the process that a lease starts there."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.config.units import Unit, parse_units
from mrl.launch.plan import ProcessSpec, environment, role_argv
from mrl.parent_death import CORES

UNIT, UNIT_EPOCH, UNIT_RUN, UNIT_POLICY = "MRL_UNIT", "MRL_UNIT_EPOCH", "MRL_UNIT_RUN", "MRL_UNIT_POLICY"
"""In the environment of a worker on a unit, and of all that it starts: whoever looks for them finds them by it."""
KEEPS_ENVIRONMENT = "SPT_NOENV"
"""Else `setproctitle` writes the title over a process's environment, where nobody would find these any more."""
UNIT_LINE = "MRL_UNIT_LINE"
"""Set where the worker may sleep: its standard input is then the line to its node."""


def units_of(config: RunConfig, host: str, *, is_first: bool) -> tuple[Unit, ...]:
    """The units of one host; those without a host's name are the first one's."""
    units = parse_units(config.allocation.units, where="")
    return tuple(unit for unit in units if unit.host == host or (is_first and not unit.host))


def unit_worker(
    config: RunConfig,
    run_folder: Path,
    unit: Unit,
    *,
    policy: str,
    epoch: int,
    gpus: Sequence[str],
    python: str = sys.executable,
) -> ProcessSpec:
    """The worker that a lease of `unit` under `epoch` starts. `gpus`: all that the host shows, as CUDA names them."""
    index = config.allocation.units.index(unit.name)
    is_cpu = unit.kind == "cpu"
    threads = len(unit.devices) if is_cpu else config.policies[policy].rollout.threads
    env = environment(threads, [] if is_cpu else [gpus[device] for device in unit.devices])
    env |= {UNIT: unit.name, UNIT_EPOCH: str(epoch), UNIT_RUN: str(run_folder.absolute()), UNIT_POLICY: policy}
    env[KEEPS_ENVIRONMENT] = "1"
    may_sleep = config.allocation.residency == "sleep"
    env |= {UNIT_LINE: "1"} if may_sleep else {}
    env |= {CORES: ",".join(map(str, unit.devices))} if is_cpu else {}
    return ProcessSpec(
        name=f"worker/{policy}/{index}",
        role="worker",
        policy=policy,
        index=index,
        argv=role_argv("worker", run_folder, python=python, policy=policy, index=index),
        env=env,
        restart="leased",
        host=unit.host,
        has_line=may_sleep,
    )
