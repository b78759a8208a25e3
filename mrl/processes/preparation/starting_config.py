"""A configuration to start from, for the user's own models and data, as TOML with a comment above each key."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from mrl.config.defaults import Choice
from mrl.config.nearest_key import field_at
from mrl.config.schema import RunConfig
from mrl.sharing.regimes import REGIMES

SHOWN = (
    "device", "rollout.engine", "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "learner.lr",
    "learner.prompts_per_step", "learner.microbatch_tokens", "learner.checkpoint_every",
)  # fmt: skip
"""Keys of every policy that the file shows; it shows another key where mrl chose its value."""
ORDER = ("run", "sharing", "tasks", "evaluation", "policies")
SAID = ("name", "model", "source")
WIDTH = 100


def policy_names(models: Sequence[str]) -> list[str]:
    """Return a short name for each model, no two alike: qwen for Qwen/Qwen3-0.6B, llama-2 for the second of a family.

    The name is the model's first word that not all models have: llama and qwen for my-llama and my-qwen.
    """
    words_of = [re.findall(r"[a-z]+", Path(model.partition("@")[0]).name.lower()) for model in models]
    common = set.intersection(*map(set, words_of))
    names: list[str] = []
    for words in words_of:
        word = next((word for word in words if word not in common), words[0] if words else "policy")
        first = name = word[:24]
        number = 1
        while name in names:
            number += 1
            name = f"{first}-{number}"
        names.append(name)
    return names


def starting_tables(
    name: str,
    models: Sequence[str],
    data: str,
    *,
    verifier: str,
    steps: int,
    device: str,
    options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the user's arguments as tables of a configuration; every other key follows from them or is a default.

    `options` are the task's, such as the names of its columns.
    """
    task = re.sub(r"[^a-z0-9_-]+", "-", Path(data).stem.lower()).strip("-_")[:32] or "task"
    tables: dict[str, Any] = {
        "run": {"name": name, "steps": steps},
        "sharing": {"regime": "sgt" if len(models) > 1 else "independent"},
        "tasks": {task: {"source": "jsonl", "dataset": data}},
        "policies": {},
    }
    if verifier:
        tables["tasks"][task]["verifier"] = verifier
    if options:
        tables["tasks"][task]["options"] = dict(options)
    for policy, model in zip(policy_names(models), models, strict=True):
        tables["policies"][policy] = {"model": model, "device": device}
    return tables


def starting_text(
    path: Path, tables: Mapping[str, Any], config: RunConfig, choices: Sequence[Choice], memory: Sequence[str]
) -> str:
    """Return the file's text: `tables`, keys that matter with their values in `config`, and the lines of `memory`."""
    # Time limits are left out: they follow from the size of a model whenever the file is read.
    why = {tuple(one.key.split(".")): one.why for one in choices if not one.key.endswith("_s")}
    policies = config.policies
    paths = {*_leaves(tables), *why, *(("policies", name, *key.split(".")) for name in policies for key in SHOWN)}
    values = {path: _value(config, path) for path in paths}
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for key in sorted((path for path, value in values.items() if value is not None), key=_place):
        groups.setdefault(key[:-1], []).append(key)
    lines = [
        f"# `mrl check {path}` shows what is missing, what runs where, and what it needs; `mrl train {path}` trains.",
        "# Every key: docs/reference/configuration.md. Options such as --run.steps 50 override this file.",
    ]
    for table, keys in groups.items():
        lines += ["", f"[{'.'.join(map(_bare, table))}]"]
        for key in keys:
            lines += _comment(_meaning(key, why.get(key, "")))
            lines.append(_line(key[-1], values[key]))
    if memory:
        lines += ["", "# Peak memory of a run, as `mrl check` estimates it:", *(f"#   {line}" for line in memory)]
    return "\n".join(lines) + "\n"


def _meaning(key: tuple[str, ...], why: str) -> str:
    """Return the first sentence of the key's reference, and `why` mrl chose the value."""
    if key == ("sharing", "regime"):
        return f"What policies share: {', '.join(REGIMES)}."
    field = field_at(key)
    text = " ".join((field.description or "").split()) if field else ""
    first = re.match(r".*?[.;:](?= |$)", text)
    said = (first[0].rstrip(".;:") if first else text) + "." * bool(text)
    return f"{said} Chosen: {why}." if why else said


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH)]


def _line(key: str, value: Any) -> str:
    """Return key and value; a table is written inline, so that later keys are not taken for its own."""
    if not isinstance(value, Mapping):
        return tomli_w.dumps({key: value}).strip()
    return f"{key} = {{ {', '.join(_line(*one) for one in value.items())} }}"


def _leaves(tables: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tables.items():
        if isinstance(value, Mapping) and key != "options":
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key)


def _value(config: RunConfig, path: tuple[str, ...]) -> Any:
    found: Any = config.model_dump(mode="json")
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _place(key: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the sort key of a key: tables in reading order, and in each SAID, then SHOWN, then the rest."""
    shown, table = ".".join(key[2:]), key[:-1]
    rank = SHOWN.index(shown) if shown in SHOWN else -1 if key[-1] in SAID else len(SHOWN)
    return (ORDER.index(key[0]) if key[0] in ORDER else len(ORDER), table[:2], len(table), table[::-1], rank, key)


def _bare(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
