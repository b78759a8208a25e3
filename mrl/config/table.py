"""The base class of the configuration's tables."""

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """A table of the configuration: frozen, typed, and closed."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
