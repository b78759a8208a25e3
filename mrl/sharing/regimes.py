"""The regimes by name: checking and building what the `[sharing]` table of a run asks for."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mrl.alignment.receiver import Receiver
from mrl.config.keys import nearest
from mrl.config.schema import Table
from mrl.errors import ConfigError
from mrl.sharing.independent import IndependentParameters, IndependentRegime
from mrl.sharing.regime import Regime
from mrl.sharing.sgt import SgtParameters, SgtRegime


class RegimeKind(NamedTuple):
    """What a name stands for: its typed table, and how to build it (parameters, policy, receiver, token limit)."""

    parameters: type[Table]
    build: Callable[[Any, str, Receiver, int], Regime]


REGIMES: dict[str, RegimeKind] = {
    "independent": RegimeKind(
        IndependentParameters, lambda p, policy, _receiver, _max: IndependentRegime(p, policy=policy)
    ),
    "sgt": RegimeKind(
        SgtParameters,
        lambda p, policy, receiver, n: SgtRegime(p, policy=policy, receiver=receiver, max_answer_tokens=n),
    ),
}
"""Every regime; a new one is added here and nowhere else."""


def build_regime(table: Mapping[str, Any], *, policy: str, receiver: Receiver, max_answer_tokens: int) -> Regime:
    """The regime of one policy.

    `receiver` expresses peer texts in the policy's tokens; rescues longer than `max_answer_tokens`, EOS included, are
    rejected. Raises ConfigError as `check_sharing` does.
    """
    parameters = check_sharing(table, "")
    return REGIMES[_name(table)].build(parameters, policy, receiver, max_answer_tokens)


def check_sharing(table: Mapping[str, Any], where: str) -> Table:
    """The typed parameters of the `[sharing]` table that stands in `where`.

    Raises ConfigError for an unknown regime, an unknown key (with the nearest valid one) or a value out of bounds.
    """
    name = _name(table)
    if name not in REGIMES:
        near = nearest(name, REGIMES)
        cure = f"did you mean {near!r}?" if near else ""
        wanted = "one of " + ", ".join(sorted(REGIMES))
        raise ConfigError("sharing.regime: no such regime", where=where, got=name, wanted=wanted, cure=cure)
    kind = REGIMES[name].parameters
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        mistakes = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        raise _explain(mistakes[0], kind, where) from error


def sharing_schema() -> dict[str, Any]:
    """JSON schema of the `[sharing]` table: one of the regimes."""
    return {"anyOf": [kind.parameters.model_json_schema(by_alias=True) for kind in REGIMES.values()]}


def _name(table: Mapping[str, Any]) -> str:
    return str(table.get("regime", "independent"))


def _explain(mistake: ErrorDetails, kind: type[Table], where: str) -> ConfigError:
    key = str(mistake["loc"][0])
    if mistake["type"] != "extra_forbidden":
        return ConfigError(f"sharing.{key}: not valid", where=where, got=mistake["input"], wanted=mistake["msg"])
    keys = [field.alias or name for name, field in kind.model_fields.items()]
    near = nearest(key, keys)
    cure = f"did you mean sharing.{near}?" if near else ""
    wanted = "" if near else "one of " + ", ".join(keys)
    return ConfigError(f"sharing.{key}: unknown key", where=where, got=key, wanted=wanted, cure=cure)
