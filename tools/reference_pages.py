"""Writer of docs/reference/, the pages for users, from the code: keys of the configuration, metrics, commands.

    .venv/bin/python tools/reference_pages.py            writes the pages
    .venv/bin/python tools/reference_pages.py --check    writes nothing, names pages that are stale, exit code 1

A key without a sentence below it is an error: the page would have a hole.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from mrl.cli.main import COMMANDS, Parser
from mrl.config.replay_table import REPLAY, ReplayTable
from mrl.config.schema import RunConfig
from mrl.config.task_tables import COLLECTIVE
from mrl.metrics.names import METRICS
from mrl.sharing.collective import CollectiveParameters
from mrl.sharing.regimes import REGIMES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Written by tools/reference_pages.py from the code: change it there. -->"


def heading(title: str, *sentences: str) -> list[str]:
    """Lines with which a page begins."""
    return [f"# {title}", "", NOTE, "", *sentences, ""]


def cell(text: str) -> str:
    """Return text for a table cell, on one line; in code, which is shown as it is, nothing is escaped."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


def code(text: str) -> str:
    """Return text as code for a table cell."""
    return "`" + " ".join(text.split()).replace("|", "\\|") + "`"


def rows(names: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table."""
    return ["| " + " | ".join(row) + " |" for row in (names, tuple("---" for _ in names), *body)] + [""]


# configuration

PLAIN = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
BOUNDS = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}",
          "multipleOf": "a multiple of {}", "minLength": "at least {} characters", "minItems": "at least {} entries",
          "maxItems": "at most {} entries", "minProperties": "at least {}"}  # fmt: skip


def type_of(schema: Mapping[str, Any]) -> str:
    """Describe the values of a key in words; `schema` is the key's."""
    if "enum" in schema or "const" in schema:
        return ", ".join(code(toml(value)) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(type_of(one) for one in schema["anyOf"] if one.get("type") != "null")
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        return f"list of {type_of(items)}" if items else "list"
    if kind == "object":
        of = schema.get("additionalProperties")
        return f"table of {type_of(of)}" if isinstance(of, dict) and of else "table"
    return PLAIN.get(str(kind), "any value") + range_of(schema)


def range_of(schema: Mapping[str, Any]) -> str:
    """Describe the bounds of a key's value; "" without any."""
    told = [text.format(f"{schema[key]:g}" if isinstance(schema[key], float) else schema[key])
            for key, text in BOUNDS.items() if key in schema]  # fmt: skip
    told += [f"as {code(schema['pattern'])}"] if "pattern" in schema else []
    return " " + ", ".join(told) if told else ""


def toml(value: object) -> str:
    """Return a default as it would be written in TOML."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case list() | tuple():
            return "[" + ", ".join(toml(one) for one in value) + "]"
        case dict():
            return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
        case float():
            return f"{value:g}" if abs(value) < 1e-3 and value else str(value)
    return str(value)


def table_in(annotation: Any) -> type[BaseModel] | None:
    """Return the table that a key holds, also if it is optional or one of many by name; None for other keys."""
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def tables_of(kind: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted name and type of a table and of all tables below it."""
    yield name, kind
    for key, field in kind.model_fields.items():
        inner = table_in(field.annotation)
        if inner is not None:
            is_named = "dict" in str(field.annotation)
            listed = f"[{key}]" if "list" in str(field.annotation) else key  # a list of tables, in TOML [[key]]
            yield from tables_of(inner, ".".join(part for part in (name, listed, "NAME" if is_named else "") if part))


def key_rows(name: str, kind: type[BaseModel]) -> list[tuple[str, ...]]:
    """Rows of a table's keys that are no tables themselves. Raises ValueError for a key without a docstring."""
    schema = kind.model_json_schema(by_alias=True)
    found: list[tuple[str, ...]] = []
    for own, field in kind.model_fields.items():
        if table_in(field.annotation) is not None:
            continue
        key = field.alias or own
        what = field.description
        if not what:
            raise ValueError(f"{name}.{key}: no sentence below it in {kind.__module__}")
        default = "(needed)"
        if field.default is not PydanticUndefined:
            default = "(left to the method)" if field.default is None else code(toml(field.default))
        found.append((code(key), type_of(resolved(schema["properties"][key], schema)), default, cell(what)))
    return found


def resolved(part: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of a schema with its reference followed."""
    name = str(part.get("$ref", "")).rpartition("/")[2]
    return whole["$defs"][name] if name else part


def configuration_page() -> list[str]:
    """Lines of the page with every table and key of the configuration."""
    lines = heading(
        "Configuration", "Every table and key of a configuration: what it may be, its default, what it says.",
        "`mrl schema -o FILE` writes the same for editors.",
        "`mrl check CONFIG` shows what a configuration resolves to.",
        "Every key can be set on the command line: `--policies.NAME.learner.lr 1e-4`.",
    )  # fmt: skip
    found = [(name, kind) for name, kind in tables_of(RunConfig, "") if name]
    found += [(f"sharing.{name}", kind.parameters) for name, kind in REGIMES.items()]
    found += [(f"sharing.{REPLAY}", ReplayTable), (f"sharing.{COLLECTIVE}", CollectiveParameters)]
    lines += ["## [sharing]", "", RunConfig.model_fields["sharing"].description or "", ""]
    regimes = ", ".join(code(f'"{name}"') for name in REGIMES)
    lines += rows(
        ("key", "what it may be", "default", "what it says"),
        [("`regime`", regimes, '`"independent"`', "Name of the regime that runs.")],
    )
    for name, kind in found:
        body = key_rows(name, kind)
        about = " ".join((kind.__doc__ or "").split())
        if not about:
            raise ValueError(f"{name}: no docstring in {kind.__module__}")
        lines += [f"## [{name}]", "", about, ""]
        lines += (
            rows(("key", "what it may be", "default", "what it says"), body) if body else ["No keys of its own.", ""]
        )
    return lines


# metrics


def metrics_page() -> list[str]:
    """Lines of the page with every name that a run writes to metrics.jsonl."""
    lines = heading(
        "Metrics", "Every name in `metrics.jsonl`, with its unit.",
        "A part in braces stands for one segment, such as the name of a policy.",
        "A `share` is a part of a whole; its text names what is counted, as in \"own answers cut at the token limit\".",
        "Look first at what is marked with *.",
    )  # fmt: skip
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, metric in METRICS.items():
        row = (code(name), metric.unit, "*" if metric.headline else "", cell(metric.what))
        groups.setdefault(name.partition("/")[0], []).append(row)
    for group, body in groups.items():
        lines += [f"## {group}", "", *rows(("name", "unit", "first", "what it says"), body)]
    return lines


# commands


def usage_of(name: str) -> str:
    """Return the output of `mrl NAME --help` on a terminal of 100 columns."""
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    parser = Parser(prog=f"mrl {name}", description=command.summary, allow_abbrev=False)
    parser.set_defaults(command=name, overrides=[])
    module.add_arguments(parser)
    return "\n".join(line.rstrip() for line in parser.format_help().rstrip().splitlines())


def commands_page() -> list[str]:
    """Lines of the page with every command and its arguments."""
    os.environ["COLUMNS"], os.environ["CUDA_VISIBLE_DEVICES"] = "100", ""
    lines = heading(
        "Commands", "What each command does, and its arguments, as `mrl COMMAND --help` prints them.",
        "Exit codes: 0 done, 1 a failure, 2 a mistake that the line on stderr says how to cure.",
    )  # fmt: skip
    for is_role in (False, True):
        if is_role:
            lines += ["## Processes of a run", "", "`mrl train` starts these; people seldom do.", ""]
        for name, command in COMMANDS.items():
            if command.is_role == is_role:
                lines += [
                    f"{'###' if is_role else '##'} mrl {name}",
                    "",
                    command.summary[0].upper() + command.summary[1:] + ".",
                ]
                more = ["Takes overrides of keys: `--key.path VALUE`."] if command.takes_overrides else []
                lines += [*more, "", "```text", usage_of(name), "```", ""]
    return lines


PAGES: dict[str, Callable[[], list[str]]] = {
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
}


def stale(folder: Path) -> Iterator[str]:
    """Yield a line for each page that differs from the code, with its first difference."""
    for name, page in PAGES.items():
        file = folder / name
        there = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        now = "\n".join(page()).splitlines()
        if there != now:
            changes = [
                line
                for line in difflib.unified_diff(there, now, lineterm="", n=0)
                if line[:2] not in ("--", "++", "@@")
            ]
            yield f"{name} is stale, first at: {changes[0][:160]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which pages are stale")
    if parser.parse_args().check:
        found = list(stale(FOLDER))
        print("\n".join([*found, "run: .venv/bin/python tools/reference_pages.py"] if found else ["all fresh"]))
        return bool(found)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text("\n".join(page()).rstrip() + "\n", encoding="utf-8")
        print(FOLDER.relative_to(ROOT) / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
