"""The table of metric names."""

import ast
import re
from pathlib import Path

import pytest

import mrl
from mrl.metrics.names import METRICS, is_known, metric_of


@pytest.mark.parametrize(
    "name",
    [
        "reward/mean",
        "loss/policy_gradient",
        "eval/accuracy",
        "eval/accuracy/spell_backward",
        "eval/pass@8",
        "sharing/hit_rate_from/llama",
        "exchange/flow_bytes/qwen/llama",
        "regime/held_groups",
    ],
)
def test_listed_names_and_filled_braces_are_known(name: str) -> None:
    """A name is known when it stands in the table or fills the braces of one that does."""
    assert is_known(name)


@pytest.mark.parametrize(
    "name",
    [
        "reward/median",
        "loss",
        "loss/",
        "eval/accuracy/a/b",
        "eval/pass@",
        "eval/pass@8/a",
        "eval/pass8",
        "eval/accuracy/{task}",
        "exchange/flow_bytes/qwen",
        "exchange/flow_bytes//llama",
        "",
    ],
)
def test_other_names_are_unknown(name: str) -> None:
    """Misspelled names, missing or surplus segments and unfilled braces are unknown."""
    assert not is_known(name)


def test_a_literal_name_wins_over_braces() -> None:
    """`loss/total` has an entry of its own beside `loss/{component}`."""
    assert metric_of("loss/total") is METRICS["loss/total"]
    assert metric_of("loss/imitation") is METRICS["loss/{component}"]


def test_every_metric_has_a_unit_and_a_meaning() -> None:
    """No entry of the table is blank, and every duration, byte or nat count says its unit in its name."""
    for name, metric in METRICS.items():
        assert metric.unit, name
        assert len(metric.what) > 5, name
        for suffix, unit in (("_s", {"s", "tokens/s"}), ("_nats", {"nats"}), ("_versions", {"versions"})):
            assert not name.endswith(suffix) or metric.unit in unit, name


def test_few_metrics_are_to_be_looked_at_first() -> None:
    """At most 25 headline metrics."""
    assert sum(metric.headline for metric in METRICS.values()) <= 25


def _names_in(source: str) -> list[str]:
    rooms = {name.partition("/")[0] for name in METRICS}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "filled" for part in node.values]
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [name for name in found if re.fullmatch(r"[a-z]+(/[a-z0-9_]+)+", name) and name.partition("/")[0] in rooms]


def _may_be_known(name: str) -> bool:
    """Whether some filling of a formatted name is known; what is filled in may be part of a segment, or a pair."""
    filling = re.compile(name.replace("filled", "[a-z_{}]+(/[a-z_{}]+)?"))
    return is_known(name) or any(filling.fullmatch(listed) for listed in METRICS)


def test_every_metric_that_the_code_names_is_in_the_table() -> None:
    """Whatever in mrl looks like a metric's name is listed."""
    package = Path(mrl.__file__).parent
    for path in sorted(package.rglob("*.py")):
        names = set(_names_in(path.read_text(encoding="utf-8"))) - {metric.unit for metric in METRICS.values()}
        unknown = [name for name in names if not _may_be_known(name)]
        assert not unknown, f"{path.relative_to(package)}: {unknown}"


def test_the_search_for_names_sees_plain_and_formatted_strings() -> None:
    """The search finds a misspelled name in either kind of string, and passes over what is no name."""
    source = 'a = {"reward/typo": 1, f"eval/accuracies/{task}": 2, "a/b": 3, "c": "see reward/mean"}'
    names = sorted(_names_in(source))
    assert names == ["eval/accuracies/filled", "reward/typo"]
    assert not any(map(_may_be_known, names))
