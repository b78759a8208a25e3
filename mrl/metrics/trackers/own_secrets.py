"""Keys and passwords of the user: told to nobody, written nowhere."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
LEAST_CHARS = 6
"""Shorter values are taken for no secret: hiding "1" would make a log unreadable."""
_OF_ENVIRONMENT = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
_OF_CONFIG = re.compile(r"(api_?key|access_?key|token|secret|password|passwd)$", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def hidden(text: str, environment: Mapping[str, str]) -> str:
    """`text` without the values of the environment's keys, and without names and passwords in addresses."""
    for name, value in environment.items():
        if len(value) >= LEAST_CHARS and _OF_ENVIRONMENT.search(name.upper()):
            text = text.replace(value, HIDDEN)
    return _IN_ADDRESS.sub(HIDDEN, text)


def without_secrets(tables: Any, environment: Mapping[str, str]) -> Any:
    """A copy of the tables of a configuration with every text hidden that is, or is named like, a secret."""
    match tables:
        case dict():
            return {
                key: HIDDEN
                if isinstance(value, str) and value and _OF_CONFIG.search(str(key))
                else without_secrets(value, environment)
                for key, value in tables.items()
            }
        case list() | tuple():
            return [without_secrets(value, environment) for value in tables]
        case str():
            return hidden(tables, environment)
    return tables
