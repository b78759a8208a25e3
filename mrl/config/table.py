"""The base class of the configuration's tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PLUGIN_NAME = r"^[A-Za-z_][\w-]*$|^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
PluginName = Annotated[str, Field(pattern=PLUGIN_NAME)]


class Table(BaseModel):
    """A table of the configuration: frozen, typed, and without other keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Tuned:
    """Values that `mrl compare --tune` tries of a regime's parameter: `floor: Annotated[float, Tuned((0.5, 0.8))]`."""

    values: tuple[Any, ...]


def tuned_fields(parameters: type[Table]) -> dict[str, tuple[Any, ...]]:
    """Return key, as a file has it -> values to try, for every field that is marked with `Tuned`."""
    return {
        field.alias or name: mark.values
        for name, field in parameters.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Tuned)
    }


def known_or_plugin(names: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of a name that editors complete, and that may be a plug-in's as well."""
    return {"anyOf": [{"enum": list(names)}, {"pattern": PLUGIN_NAME}]}
