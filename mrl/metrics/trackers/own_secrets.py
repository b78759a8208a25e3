"""Removal of the user's keys and passwords from texts and tables, before these are written or sent."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "***"
LEAST_CHARS = 6
"""Fewest characters of a secret: hiding shorter values such as "1" would make a log unreadable."""
_OF_ENVIRONMENT = re.compile(
    r"(KEY|TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(^|_)(PASS|PWD|PAT|AUTH|COOKIE))$"
)
_NO_SECRETS = ("PWD",)
"""Variables that match by name and are no secrets: PWD is the folder of a shell."""
_OF_CONFIG = re.compile(
    r"((api|access|secret|private|auth)[_-]?key|token|secret|password|passwd|passphrase|(^|[_-])(pass|pat|auth))$",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def hidden(text: str, environment: Mapping[str, str]) -> str:
    """Return `text` without the values of secret environment variables, and without names and passwords in URLs."""
    for name, value in environment.items():
        name = name.upper()
        if len(value) >= LEAST_CHARS and _OF_ENVIRONMENT.search(name) and name not in _NO_SECRETS:
            text = text.replace(value, HIDDEN)
    return _IN_ADDRESS.sub(HIDDEN, text)


def without_secrets(tables: Any, environment: Mapping[str, str]) -> Any:
    """Return a copy of configuration tables in which every text is hidden that is a secret or is named like one.

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
    """Yield the words of a command, hiding words after an option that is named like a secret, up to the next option."""
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
    """Hide secrets in a JSON object; text that is no JSON goes through `hidden`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return hidden(text, environment)
    return json.dumps(without_secrets(found, environment))
