"""Texts of the files that a policy's `prompt` table names, read once into the table: a run asks the same to its end.

Processes on other hosts, and a resumed run, have the texts from `config.json`.
"""

from pathlib import Path

from pydantic import ValidationError

from mrl.config.policy_tables import PromptTable, ShotTable
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.records.canonical_json import parse_json

MAX_FILE_BYTES = 1024 * 1024
FORM = '{"user": "...", "assistant": "..."}'
CODE = ("{{", "{%")
"""Marks of Jinja code: every template has one of them, and no file name does."""


def with_prompt_texts(config: RunConfig, *, where: str) -> RunConfig:
    """Return `config` with the texts of these files. Raises ConfigError for a file that cannot be read or is none."""
    policies = dict(config.policies)
    for name, policy in config.policies.items():
        key = f"policies.{name}.prompt"
        prompt = _with_template(_with_shots(policy.prompt, key, where), key, where)
        if prompt is not policy.prompt:
            policies[name] = policy.model_copy(update={"prompt": prompt})
    return config.model_copy(update={"policies": policies})


def _with_template(prompt: PromptTable, key: str, where: str) -> PromptTable:
    named = prompt.chat_template
    if not named or any(code in named for code in CODE):
        return prompt
    text = _read(named, f"{key}.chat_template", where, wanted="a file with a Jinja template, or the template itself")
    if not any(code in text for code in CODE):
        what, wanted = f"{key}.chat_template: the file contains no Jinja template", 'a template with "{{" or "{%"'
        raise ConfigError(what, where=f"{where}: {named}", got=text[:60], wanted=wanted)
    return prompt.model_copy(update={"chat_template": text})


def _with_shots(prompt: PromptTable, key: str, where: str) -> PromptTable:
    if not prompt.few_shot_file:
        return prompt
    key, found = f"{key}.few_shot_file", list(prompt.few_shot)
    text = _read(prompt.few_shot_file, key, where, wanted=f"a JSONL file with one object per line: {FORM}")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(ShotTable.model_validate(parse_json(line), strict=True))
        except ValueError as error:  # pydantic's own is one, too
            place = f"{where}: {prompt.few_shot_file}:{number}"
            why = "" if isinstance(error, ValidationError) else f" ({error})"
            raise ConfigError(
                f"{key}: invalid few-shot example{why}", where=place, got=line[:60], wanted=FORM
            ) from None
    return prompt.model_copy(update={"few_shot": found, "few_shot_file": ""})


def _read(named: str, key: str, where: str, *, wanted: str) -> str:
    path = Path(named)
    try:
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            got = f"{path.stat().st_size:,} bytes"
            raise ConfigError(f"{key}: the file is too large", where=where, got=got, wanted=f"<= {MAX_FILE_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: the file is not UTF-8", where=where, got=named, wanted=wanted) from None
    except OSError as error:
        relative = "" if path.is_absolute() else f" (relative to the working directory {Path.cwd()})"
        what = f"{key}: cannot read the file ({error.strerror}){relative}"
        raise ConfigError(what, where=where, got=named[:200], wanted=wanted) from None
