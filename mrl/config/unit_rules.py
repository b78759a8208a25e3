"""Rules for runs whose workers live on leased units."""

from mrl.config.schema import RunConfig
from mrl.config.unit_types import named_types
from mrl.config.units import Unit, parse_units
from mrl.errors import ConfigError

KINDS = {"cpu": "cpu", "cuda": "gpu"}
"""Device of a policy -> kind of unit that its engine fits."""


def check_units(config: RunConfig, *, where: str) -> None:
    """Raises ConfigError for units that contradict each other or the policies."""
    table = config.allocation
    units = parse_units(table.units, where=where)
    named_types(table.unit_types, units, where=where)
    if config.run.sync:
        raise ConfigError(
            "allocation.units: a synchronous run keeps its workers where they are",
            where=where,
            got=table.units,
            wanted="no units, or run.sync = false",
        )
    for name in config.learning:
        _check_policy(config, name, units, where)
    for kind in dict.fromkeys(KINDS.values()):
        rivals = [name for name in config.learning if KINDS[config.policies[name].device] == kind]
        have = sum(unit.kind == kind for unit in units)
        if table.floor_units * len(rivals) > have:
            raise ConfigError(
                f"allocation.floor_units: more floors than {kind} units",
                where=where,
                got=f"{table.floor_units} * {len(rivals)} policies > {have} units",
                wanted=f"floor_units <= {have // len(rivals)}",
                cure="0 lets policies take turns" if have < len(rivals) else "",
            )


def may_sleep(config: RunConfig, policy: str) -> bool:
    """Whether engines of a policy lie on units and sleep there while another policy has them."""
    return bool(config.allocation.units) and config.allocation.residency == "sleep" and policy in config.learning


def _check_policy(config: RunConfig, name: str, units: tuple[Unit, ...], where: str) -> None:
    policy, table = config.policies[name], config.allocation
    if not any(unit.kind == KINDS[policy.device] for unit in units):
        raise ConfigError(
            f"allocation.units: none on which an engine of {name} fits",
            where=where,
            got=table.units,
            wanted=f"a {KINDS[policy.device]} unit, for policies.{name}.device = {policy.device!r}",
        )
    if policy.rollout.server.url:
        raise ConfigError(
            f"policies.{name}.rollout.server.url: a server that somebody else started is on no unit",
            where=where,
            got=policy.rollout.server.url,
            wanted="no url: the worker on a unit starts its server there",
            cure="or no allocation.units",
        )
    slots = table.slots // len(units)
    if slots < policy.rollout.group_size:
        raise ConfigError(
            f"allocation.slots: an engine of {name} could not hold one whole group",
            where=where,
            got=f"{table.slots} slots / {len(units)} units = {slots}",
            wanted=f"slots >= {policy.rollout.group_size * len(units)}, group_size * units",
        )
