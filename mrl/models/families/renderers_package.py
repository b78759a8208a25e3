"""Access to the package `renderers`, which knows how families of models write turns and tool calls.

The package is imported only where a policy names its family: it brings a client of OpenAI's API.
"""

import copy
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from mrl.errors import ConfigError, MissingError, ModelFolderError

TRIED = "0.1.12"
"""The only version that is used; nobody has compared the output of others with chat templates."""
KEY, INSTALL = "prompt.family", "pip install 'mrl[renderers]'"


def renderer_of(tokenizer: Any, family: str, options: Mapping[str, Any]) -> Any:
    """Return the package's renderer of a family, which keeps the reasoning of earlier turns; it takes its own keys of
    `options`.

    Raises MissingError without the package, ConfigError for a family that it does not know, and ModelFolderError where
    it cannot use the tokenizer.
    """
    where = f"{KEY} = {family!r}"
    _check_version(where)
    from renderers import config_from_name, create_renderer, template_field_names
    from renderers.base import MODEL_RENDERER_MAP

    if family not in (known := sorted(set(MODEL_RENDERER_MAP.values()))):
        raise ConfigError("the renderers package does not know this family", where=where, wanted=", ".join(known))
    try:
        named: Any = config_from_name(family)
        given = {key: options[key] for key in template_field_names(named) & set(options)}
        nameless = copy.copy(tokenizer)  # else the package reads from words in the folder's path which model it is
        nameless.name_or_path = ""
        return create_renderer(nameless, type(named)(thinking_retention="all"), chat_template_kwargs=given)
    except Exception as error:  # assertions, and errors of pydantic and of a download, among them
        raise ModelFolderError(
            "the renderers package cannot use the model's tokenizer or template options for this family",
            where=where,
            got=" ".join(str(error).split())[:200] or type(error).__name__,
            cure="set policies.X.prompt.family to the model's own family, or remove it",
        ) from error


def _check_version(where: str) -> None:
    try:
        version = importlib.metadata.version("renderers")
    except importlib.metadata.PackageNotFoundError:
        raise MissingError("the renderers package is not installed", where=where, cure=INSTALL) from None
    if version != TRIED:
        what = "this version of the renderers package is not supported"
        raise MissingError(what, where=where, got=version, wanted=TRIED, cure=INSTALL)
