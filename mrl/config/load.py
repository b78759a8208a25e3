"""Loading: a TOML file and overrides become a `RunConfig`, or one line that says which key of which file is wrong."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mrl.config.defaults import Resolved, by_device
from mrl.config.nearest_key import nearest
from mrl.config.overrides import apply_overrides, parse_overrides
from mrl.config.prompt_texts import with_prompt_texts
from mrl.config.rules.run_rules import check_rules
from mrl.config.schema import RunConfig
from mrl.config.validation_errors import explain
from mrl.errors import ConfigError
from mrl.plugins import use_modules

MAX_CONFIG_BYTES = 4 * 1024 * 1024


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the validated configuration of the file at `path`, with `overrides` and its devices' defaults in it.

    Raises ConfigError: missing or unreadable file, TOML syntax (with its line), unknown key (with the nearest valid
    one), wrong type, out of bounds, or tables that contradict each other.
    """
    return load_resolved(path, overrides).config


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> Resolved:
    """Return the configuration of `load_config`, and the values chosen for keys that were left out."""
    return resolve(parse_toml(read_text(path), where=str(path)), parse_overrides(overrides), where=str(path))


def resolve(tables: dict[str, Any], pairs: Sequence[tuple[tuple[str, ...], Any]], *, where: str) -> Resolved:
    """Return the result of `load_resolved` for tables as a file has them and overrides as (path of the key, value)."""
    overridden = {key for key, _ in pairs}
    config = validate(apply_overrides(tables, pairs), where=where, overridden=overridden)
    config = with_modules(config, where=where)
    use_modules(config.run.modules)
    resolved = by_device(with_prompt_texts(config, where=where))
    check_rules(resolved.config, where=where)
    return resolved


def validate(tables: dict[str, Any], *, where: str, overridden: set[tuple[str, ...]] | None = None) -> RunConfig:
    """Return `tables` as a RunConfig, types taken strictly ("8" is no number).

    Raises ConfigError naming the first mistake.
    """
    try:
        return RunConfig.model_validate_json(json.dumps(tables, default=str), strict=True)
    except ValidationError as error:
        raise explain(error, tables, where=where, overridden=overridden or set()) from None


def with_modules(config: RunConfig, *, where: str) -> RunConfig:
    """Return `config` with the folder of the modules that it names: `run.modules`, else the folder of the file."""
    named = [config.sharing.get("regime"), *(table.kind for table in config.trackers)]
    tasks = config.tasks.values()
    named += [name for table in tasks for name in (table.source, table.verifier, table.evaluator)]
    named += [table.dataset for table in tasks if table.is_played]
    if not config.run.modules and not any(":" in str(name) for name in named):
        return config
    folder = config.run.modules or (Path(where).parent if Path(where).is_file() else Path())
    run = config.run.model_copy(update={"modules": str(Path(folder).absolute())})
    return config.model_copy(update={"run": run})


def read_text(path: Path) -> str:
    """Return the text of a config file.

    Raises ConfigError when it is missing, no file, unreadable, too large or not UTF-8.
    """
    try:
        if not path.exists():
            raise ConfigError("no such file", where=str(path), cure=_nearby(path))
        if not path.is_file():
            raise ConfigError("not a file", where=str(path), wanted="a TOML file")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                "the file is too large for a configuration", where=str(path), wanted=f"<= {MAX_CONFIG_BYTES} bytes"
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the file is not UTF-8 text", where=str(path), got=f"an invalid byte at {error.start}", wanted="a TOML file"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the file ({error.strerror})", where=str(path), cure="check its permissions"
        ) from None


def parse_toml(text: str, *, where: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ConfigError with the line; a name given twice is said as such."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, line = _split_line(str(error))
        spot = f"{where}:{line}" if line else where
        twice = re.search(r"Cannot declare \((.*?),?\) twice", message)
        if twice:
            table = ".".join(re.findall(r"'([^']*)'", twice.group(1)))
            collection = {"policies": "policies", "tasks": "tasks"}.get(table.split(".")[0], "tables")
            raise ConfigError(
                f"[{table}] is defined twice: two {collection} have the same name",
                where=spot,
                cure="rename one of them",
            ) from None
        if "overwrite a value" in message:
            raise ConfigError(
                "a key is set twice in one table", where=spot, cure="delete one of the two lines"
            ) from None
        cure = "write texts in quotes, true and false in lower case" if message == "Invalid value" else ""
        raise ConfigError(f"not valid TOML: {message}", where=spot, cure=cure) from None


def _split_line(message: str) -> tuple[str, str]:
    found = re.match(r"(.*?) \(at line (\d+), column \d+\)$", message)
    return (found.group(1), found.group(2)) if found else (message, "")


def _nearby(path: Path) -> str:
    """Return a hint: the configuration most likely meant, beside `path` or in `configs/`, else how to list them all."""
    folders = dict.fromkeys((path.parent, Path("configs")))
    known = {file.stem: file for folder in folders for file in sorted(folder.glob("*.toml"))}
    near = nearest(path.stem, known)
    if near:
        return f"did you mean {known[near]}?"
    places = " ".join(dict.fromkeys(str(file.parent / "*.toml") for file in known.values()))
    listed = f"`ls {places}` lists the available configurations" if places else "give the path of a TOML file"
    return f"{listed}; `mrl quickstart --show` prints an example"
