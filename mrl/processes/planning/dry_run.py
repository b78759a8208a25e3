"""Describe what a launch would start: hosts, processes, devices, commands, environments."""

import itertools
import shlex
from collections.abc import Iterator

from mrl.config.schema import RunConfig
from mrl.processes.planning.plan import Plan, ProcessSpec
from mrl.processes.planning.unit_workers import UNIT


def describe(plan: Plan, config: RunConfig) -> Iterator[str]:
    """Yield lines for a person. Devices of another host are chosen on that host, among those that it shows."""
    for name in [host.name for host in plan.hosts] or [""]:
        yield f"host {name or 'here'}" + (", owns the run folder" if name == plan.first_host else "")
        for spec in plan.started_by(name):
            yield from _process(spec, config)
        for unit, specs in itertools.groupby(plan.leased, key=lambda spec: spec.env[UNIT]):
            here = [spec for spec in specs if spec.host == name]
            if here:
                yield f"  unit {unit}, where a lease starts one of"
            for spec in here:
                yield from (f"  {line}" for line in _process(spec, config))


def _process(spec: ProcessSpec, config: RunConfig) -> Iterator[str]:
    yield f"  {spec.name}{ranks_told(spec, config)}{_device(spec, config)}"
    yield f"    {shlex.join(spec.argv)}"
    yield "    " + " ".join(f"{key}={shlex.quote(value)}" for key, value in spec.env.items())


def ranks_told(spec: ProcessSpec, config: RunConfig) -> str:
    """Return which ranks a process of a learner over several hosts starts; "" for every other process."""
    if spec.role != "learner" or config.policies[spec.policy].learner.hosts == 1:
        return ""
    per_host = config.policies[spec.policy].learner.ranks_per_host
    first, last = spec.index * per_host, (spec.index + 1) * per_host - 1
    return f", ranks {first}-{last}" if first < last else f", rank {first}"


def _device(spec: ProcessSpec, config: RunConfig) -> str:
    if not spec.policy or config.policies[spec.policy].device == "cpu":
        return ""
    return f", GPUs {spec.env.get('CUDA_VISIBLE_DEVICES', 'visible on the host')}"
