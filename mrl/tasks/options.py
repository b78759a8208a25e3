"""The options of a task, checked against its source's own table."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from mrl.config.nearest_key import nearest
from mrl.config.table import Table
from mrl.config.validation_errors import wanted_by
from mrl.errors import TaskError

Options = TypeVar("Options", bound=Table)


def checked_options(table: type[Options], options: Mapping[str, Any], *, where: str) -> Options:
    """Return the options as the source's table. Raises TaskError for the first that does not exist or is not valid."""
    try:
        return table.model_validate(dict(options))
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in mistake["loc"])
        wanted = "one of " + ", ".join(table.model_fields) if mistake["type"] == "extra_forbidden" else ""
        what, near = "invalid value", ""
        if mistake["type"] == "extra_forbidden":
            what, near = "unknown option", nearest(key, table.model_fields)
        cure = f"did you mean options.{near}?" if near else ""
        wanted = wanted or wanted_by(mistake)
        raise TaskError(
            f"options.{key}: {what}", where=where, got=mistake["input"], wanted=wanted, cure=cure
        ) from error
