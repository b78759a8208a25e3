"""Keys and passwords of the user: told to nobody, written nowhere."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "***"
LEAST_CHARS = 6
"""Shorter values are taken for no secret: hiding "1" would make a log unreadable."""
_OF_ENVIRONMENT = re.compile(
    r"(KEY|TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(^|_)(PASS|PWD|PAT|AUTH|COOKIE))$"
)
_NO_SECRETS = ("PWD",)
"""The folder that a shell is in."""
_OF_CONFIG = re.compile(
    r"((api|access|secret|private|auth)[_-]?key|token|secret|password|passwd|passphrase|(^|[_-])(pass|pat|auth))$",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def hidden(text: str, environment: Mapping[str, str]) -> str:
    """`text` without the values of the environment's keys, and without names and passwords in addresses."""
    for name, value in environment.items():
        name = name.upper()
        if len(value) >= LEAST_CHARS and _OF_ENVIRONMENT.search(name) and name not in _NO_SECRETS:
            text = text.replace(value, HIDDEN)
    return _IN_ADDRESS.sub(HIDDEN, text)


def without_secrets(tables: Any, environment: Mapping[str, str]) -> Any:
    """A copy of the tables of a configuration with every text hidden that is, or is named like, a secret.

    Lists may be the words of a command: `--api-key VALUE ...`, `--api-key=VALUE`, `--settings {"api_key": "VALUE"}`.
    """
    match tables:
        case dict():
            return {
                key: HIDDEN
                if isinstance(value, str) and value and _OF_CONFIG.search(str(key))
                else without_secrets(value, environment)
                for key, value in tables.items()
            }
        case list() | tuple():
            return list(_of_words(tables, environment))
        case str():
            return _of_json(tables, environment) if tables.startswith("{") else hidden(tables, environment)
    return tables


def _of_words(words: Sequence[Any], environment: Mapping[str, str]) -> Iterator[Any]:
    """The same of the words of a command: what follows an option that is named like a secret, up to the next one."""
    is_secret = False
    for word in words:
        if not isinstance(word, str):
            yield without_secrets(word, environment)
            continue
        option, equals, value = word.partition("=")
        if word.startswith("--"):
            is_secret = _OF_CONFIG.search(option) is not None
            if is_secret and equals:
                yield f"{option}={HIDDEN}"
            else:
                yield f"{option}{equals}{without_secrets(value, environment)}"
        else:
            yield HIDDEN if is_secret else without_secrets(word, environment)


def _of_json(text: str, environment: Mapping[str, str]) -> str:
    """The same of an object in JSON, where it is one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return hidden(text, environment)
    return json.dumps(without_secrets(found, environment))
