"""README and docs/: every link leads somewhere, every command and every configuration key is a real one."""

import argparse
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import COMMANDS, Parser
from mrl.config.nearest_key import is_named_collection, table_keys
from mrl.config.overrides import parse_overrides
from mrl.config.replay_table import REPLAY, ReplayTable
from mrl.config.task_tables import COLLECTIVE
from mrl.errors import ConfigError
from mrl.metrics.names import METRICS, is_known
from mrl.sharing.collective import CollectiveParameters
from mrl.sharing.regimes import REGIMES
from tests.support.pages import PAGES, ROOT, blocks, inline_code, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
METRIC = re.compile(r"[a-z]+(/[a-z0-9_<>]+)+")
EVERY_PAGE = [*PAGES, *sorted((ROOT / "docs" / "reference").glob("*.md"))]


def by_name(page: Path) -> str:
    """Where the page lies."""
    return page.relative_to(ROOT).as_posix()


def anchors(markdown: str) -> set[str]:
    """What a link may name behind "#": headings as sites of Markdown pages write them."""
    titles = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in HEADING.findall(prose(markdown)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page without a file, or without the heading that they name."""
    broken = []
    for link in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


def commands(markdown: str) -> Iterator[list[str]]:
    """Calls of `mrl` in inline code and in blocks of shell, as words."""
    lines = [line for block in [*blocks(markdown, ""), *blocks(markdown, "bash")] for line in block.splitlines()]
    for code in [*inline_code(markdown), *(line.strip().removeprefix("$ ") for line in lines)]:
        match code.split():
            case ["mrl", word, *_] if re.fullmatch(r"[a-z-]+", word):
                yield shlex.split(code.replace("'", ""), comments=True)[1:]


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Options of a command and of the commands below it."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    deeper = [flags_of(one) for action in below for one in action.choices.values()]
    return set(parser._option_string_actions).union(*deeper)


def fault_of(words: list[str]) -> str:
    """What is wrong with a call of `mrl`; "" for nothing. Paths and names are not looked at."""
    name, *rest = words
    name = f"{name} {rest[0]}" if rest and f"{name} {rest[0]}" in COMMANDS else name
    if name in ("--help", "--version"):
        return ""
    if name not in COMMANDS:
        return f"no command {name}"
    parser = Parser(prog=name, allow_abbrev=False)
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
        if "." in option and COMMANDS[name].takes_overrides:
            try:
                parse_overrides([option, "1"])
            except ConfigError as error:
                return str(error)
        elif option not in flags_of(parser):
            return f"mrl {name} has no {option}"
    return ""


def unknown_keys(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    """Keys of a configuration, or of a part of one, that the schema does not have."""
    if path == ("sharing",):
        regimes = {name: set(_names(kind.parameters)) for name, kind in REGIMES.items()}
        regimes[REPLAY] = set(_names(ReplayTable))
        regimes[COLLECTIVE] = set(_names(CollectiveParameters))
        below = {name: value for name, value in table.items() if isinstance(value, dict)}
        return [f"sharing.{name}.{key}" for name, keys in below.items() for key in keys if key not in regimes[name]]
    keys = table_keys(path)
    found = [".".join((*path, key)) for key in table if keys is not None and key not in keys]
    known = [key for key in table if keys is None or key in keys]
    deeper = [key for key in known if isinstance(table[key], dict) and _is_table((*path, key))]
    return found + [fault for key in deeper for fault in unknown_keys(table[key], (*path, key))]


def metrics(markdown: str) -> list[str]:
    """Names in inline code that begin as those of metrics do; files have a point or end with a slash."""
    groups = {name.split("/")[0] for name in METRICS}
    return [code for code in inline_code(markdown) if METRIC.fullmatch(code) and code.split("/")[0] in groups]


def _names(parameters: Any) -> Iterator[str]:
    return (field.alias or name for name, field in parameters.model_fields.items())


def _is_table(path: tuple[str, ...]) -> bool:
    return path == ("sharing",) or table_keys(path) is not None or is_named_collection(path)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=by_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading of it where one is named."""
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_command_is_a_real_one(page: Path) -> None:
    """With options that it has, and keys that a configuration has."""
    faults = [(words, fault_of(words)) for words in commands(page.read_text(encoding="utf-8"))]
    assert [(words, fault) for words, fault in faults if fault] == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_key_in_toml_is_a_real_one(page: Path) -> None:
    """In every block that shows a configuration. The page about a regime that is not there yet adds that one."""
    shown = [tomllib.loads(block) for block in blocks(page.read_text(encoding="utf-8"), "toml")]
    shown = [table for table in shown if table.get("sharing", {}).get("regime", "sgt") in REGIMES]
    assert [fault for table in shown for fault in unknown_keys(table)] == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_metric_is_a_real_one(page: Path) -> None:
    """What looks like the name of a metric is one."""
    assert [name for name in metrics(page.read_text(encoding="utf-8")) if not is_known(name)] == []


def test_every_page_is_in_the_index() -> None:
    """The list of pages is complete, so that none is lost."""
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert [by_name(page) for page in EVERY_PAGE if page.parent != ROOT and page not in {index, *linked}] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """A missing file, a missing heading; not what is there, elsewhere, or in a block."""
    (tmp_path / "b.md").write_text("# One `two` three\n")
    text = "[a](b.md) [b](b.md#one-two-three) [c](b.md#four) [d](c.md) [e](https://x.y/z) [f](#here)\n"
    (tmp_path / "a.md").write_text(text + "```\n[g](h.md)\n```\n## Here\n")
    assert broken_links(tmp_path / "a.md") == ["b.md#four", "c.md"]


@pytest.mark.parametrize(
    ("code", "fault"),
    [("mrl train a.toml --clean --run.steps 3 --policies.X.learner.lr=1", ""),
     ("mrl exchange keys RUN list", ""),
     ("mrl align card A B --only-text", ""),
     ("mrl trian a.toml", "no command trian"),
     ("mrl train a.toml --cleam", "mrl train has no --cleam"),
     ("mrl export RUN --run.steps 3", "mrl export has no --run.steps"),
     ("mrl train a.toml --run.step 3", "unknown key")],
)  # fmt: skip
def test_a_wrong_command_is_found(code: str, fault: str) -> None:
    """In inline code and in blocks; an option that the command lacks, and a key that a configuration lacks."""
    for markdown in (f"Say `{code}`.\n", f"```\n{code}    # why\n```\n"):
        (words,) = commands(markdown)
        assert fault in fault_of(words)
        assert bool(fault) == bool(fault_of(words))


def test_a_wrong_metric_is_found() -> None:
    """Among names of metrics, files and others."""
    text = "`eval/accuracy/<task>` `eval/acuracy` `exchange/exchange.sqlite` `crash/stacks/` `learner/qwen` `a/b`\n"
    assert [name for name in metrics(text) if not is_known(name)] == ["eval/acuracy"]


def test_a_wrong_key_is_found() -> None:
    """At any depth, also of a regime."""
    text = (
        "run.steps = 1\nrun.step = 1\nsharing.sgt.lambda = 1\nsharing.sgt.lamda = 1\npolicies.a.learner.lora.rang = 1\n"
    )
    text += "tasks.t.options.anything = 1\nallocation.unit_types.H100 = []\n"
    assert unknown_keys(tomllib.loads(text)) == ["run.step", "sharing.sgt.lamda", "policies.a.learner.lora.rang"]


@pytest.mark.parametrize("regime", [name for name, kind in REGIMES.items() if not kind.goes_on_in_episodes])
def test_a_regime_shows_its_curve_and_says_what_drew_it(regime: str) -> None:
    """A picture of that regime with the command, the commit, and how many seeds it stands on; of those that run on the
    quickstart, which has no episodes."""
    page = (ROOT / "docs" / "sharing" / f"{regime}.md").read_text(encoding="utf-8")
    curve = page.split("## Its curve", 1)[1].split("\n## ", 1)[0]
    assert f"(../figures/curve_{regime}.png)" in curve
    assert re.search(rf"mrl compare quickstart --regimes (independent,)?{regime} ", curve)
    assert re.search(r"with commit [0-9a-f]{7}", curve)
    assert re.search(r"one seed|(two|six|nine) seeds", curve)
