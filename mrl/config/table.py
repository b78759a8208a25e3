"""The base class of the configuration's tables."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PLUGIN_NAME = r"^[A-Za-z_][\w-]*$|^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
PluginName = Annotated[str, Field(pattern=PLUGIN_NAME)]


class Table(BaseModel):
    """A table of the configuration: frozen, typed, and closed."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def known_or_plugin(names: Sequence[str]) -> dict[str, Any]:
    """JSON schema of a name that editors complete, and that may be a plug-in's as well."""
    return {"anyOf": [{"enum": list(names)}, {"pattern": PLUGIN_NAME}]}
