"""Rules for runs whose workers live on leased units."""

from mrl.config.nearest_key import nearest
from mrl.config.schema import RunConfig
from mrl.config.unit_names import Unit, parse_units
from mrl.config.unit_types import named_types
from mrl.errors import ConfigError

KINDS = {"cpu": "cpu", "cuda": "gpu"}
"""Device of a policy -> kind of unit that its engine fits."""


def check_units(config: RunConfig) -> None:
    """Raises ConfigError for units that contradict each other or the policies."""
    table = config.allocation
    units = parse_units(table.units)
    named_types(table.unit_types, units)
    for name in config.learning:
        _check_types(config, name)
    if config.run.sync:
        raise ConfigError(
            "allocation.units: a synchronous run cannot move its workers",
            got=table.units,
            wanted="no units, or run.sync = false",
        )
    for name in config.learning:
        _check_policy(config, name, units)
    _check_turns(config)


def fitting_units(config: RunConfig, policy: str) -> frozenset[str]:
    """Return the units on which an engine of a policy fits: of its device's kind, and of the types that it names."""
    table, own = config.allocation, config.policies[policy]
    units = parse_units(table.units)
    types = named_types(table.unit_types, units)
    wanted = own.rollout.unit_types
    return frozenset(
        unit.name for unit in units if unit.kind == KINDS[own.device] and (not wanted or types.get(unit.name) in wanted)
    )


def are_in_turns(config: RunConfig) -> bool:
    """Whether learners have GPU units in turns with the engines that are leased onto them."""
    return any(policy.turns and policy.device == "cuda" for policy in config.policies.values())


def may_sleep(config: RunConfig, policy: str) -> bool:
    """Whether engines of a policy sleep on their GPU units while other policies have these units.

    An engine on cores never sleeps: asleep it would keep all its memory, so that it ends instead.
    """
    table = config.allocation
    is_leased = bool(table.units) and policy in config.learning
    return is_leased and table.residency == "sleep" and config.policies[policy].device == "cuda"


def _check_turns(config: RunConfig) -> None:
    """Check that a policy which takes no turns has no unit beside policies that do."""
    for name, policy in config.policies.items():
        others = [one for one, other in config.policies.items() if other.turns and other.device == policy.device]
        if not others or policy.rollout.server.url:
            continue
        if config.allocation.residency == "sleep" and policy.device == "cuda":
            raise ConfigError(
                f'allocation.residency = "sleep": cannot be combined with policies.{others[0]}.turns',
                got="sleep",
                wanted='"stop", because engines leave the device anyway when it is another policy\'s turn',
            )
        if not policy.turns:
            embedded = f' with policies.{name}.rollout.engine = "embedded"' * policy.frozen
            raise ConfigError(
                f"policies.{name}.turns: other policies take turns on the same kind of device",
                got="turns = false",
                wanted=f"true, as policies.{others[0]}.turns",
                cure=f"set policies.{name}.turns = true{embedded}, or turns = false for all that share it",
            )


def _check_types(config: RunConfig, name: str) -> None:
    known = config.allocation.unit_types
    for unit_type in config.policies[name].rollout.unit_types:
        if unit_type not in known:
            near = nearest(unit_type, known)
            raise ConfigError(
                f"policies.{name}.rollout.unit_types: unknown type of unit",
                got=unit_type,
                wanted=f"one of {', '.join(known)}" if known else "a name in allocation.unit_types, which is empty",
                cure=f"did you mean {near!r}?" if near else "",
            )


def _check_policy(config: RunConfig, name: str, units: tuple[Unit, ...]) -> None:
    policy, table = config.policies[name], config.allocation
    if not fitting_units(config, name):
        types = policy.rollout.unit_types
        raise ConfigError(
            f"allocation.units: no unit can run an engine of {name}",
            got=table.units,
            wanted=f"a {KINDS[policy.device]} unit, for policies.{name}.device = {policy.device!r}"
            + f", of type {' or '.join(types)}" * bool(types),
        )
    if policy.rollout.server.url:
        raise ConfigError(
            f"policies.{name}.rollout.server.url: a server that the run does not start cannot use leased units",
            got=policy.rollout.server.url,
            wanted="no url, so that the worker on a unit starts a server there",
            cure="remove the url, or allocation.units",
        )
    _check_gpus(config, name, units)
    slots = table.slots // len(units)
    if slots < policy.rollout.group_size:
        raise ConfigError(
            f"allocation.slots: too few slots per unit for one whole group of {name}",
            got=f"{table.slots} slots / {len(units)} units = {slots}",
            wanted=f"slots >= {policy.rollout.group_size * len(units)}, group_size * units",
        )


def _check_gpus(config: RunConfig, name: str, units: tuple[Unit, ...]) -> None:
    """Check the GPUs of units: a server takes all GPUs of its unit, and the embedded engine one."""
    rollout, fitting = config.policies[name].rollout, fitting_units(config, name)
    if rollout.gpus > 1:
        raise ConfigError(
            f"policies.{name}.rollout.gpus: with leased units, the unit determines the number of GPUs",
            got=rollout.gpus,
            cure=f"remove this key, and list units of {rollout.gpus} GPUs, such as gpu:"
            + ",".join(map(str, range(rollout.gpus))),
        )
    wide = [unit for unit in units if unit.kind == "gpu" and len(unit.devices) > 1 and unit.name in fitting]
    if wide and rollout.engine == "embedded":
        raise ConfigError(
            f"allocation.units: the embedded engine of {name} uses only one GPU of a unit",
            got=wide[0].name,
            wanted="units of one GPU",
            cure=f"list units of one GPU each, or set policies.{name}.rollout.unit_types without this unit's type",
        )
