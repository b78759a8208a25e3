"""The pages of docs/reference are what the code says, whole, and readable as Markdown."""

from collections.abc import Iterator
from functools import cache

import pytest
import reference_pages
from pydantic import Field

from mrl.config.nearest_key import all_keys
from mrl.config.table import Table
from mrl.metrics.names import METRICS


@pytest.fixture(scope="module", autouse=True)
def _each_page_is_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_pages, "PAGES", {name: cache(page) for name, page in reference_pages.PAGES.items()})
        yield


def test_the_pages_are_what_the_code_says() -> None:
    """Else: .venv/bin/python tools/reference_pages.py."""
    assert list(reference_pages.stale(reference_pages.FOLDER)) == []
    for name in reference_pages.PAGES:
        assert reference_pages.NOTE in (reference_pages.FOLDER / name).read_text(encoding="utf-8")


def test_every_key_and_every_metric_has_a_row() -> None:
    """By its last name; a table that is optional is walked into as well."""
    configuration, metrics = ("\n".join(reference_pages.PAGES[f"{name}.md"]()) for name in ("configuration", "metrics"))

    assert [key for key in all_keys() if f"`{key.rpartition('.')[2]}`" not in configuration and key != "sharing"] == []
    assert [name for name in METRICS if f"`{name}`" not in metrics] == []


def test_a_stale_page_is_found(tmp_path) -> None:
    """One line that differs, and a page that is not there."""
    for name, page in reference_pages.PAGES.items():
        (tmp_path / name).write_text("\n".join(page()))
    assert list(reference_pages.stale(tmp_path)) == []

    metrics = tmp_path / "metrics.md"
    metrics.write_text(metrics.read_text().replace("learning rate", "speed"))
    (tmp_path / "commands.md").unlink()

    assert [line.split()[0] for line in reference_pages.stale(tmp_path)] == ["metrics.md", "commands.md"]


def test_a_key_without_a_sentence_is_refused() -> None:
    """By its table, its name and its module."""

    class Holed(Table):
        """A table."""

        told: int = Field(default=1, ge=0)
        """What it is."""
        untold: int = 1

    with pytest.raises(ValueError, match=r"run\.untold: no sentence below it in .*test_reference_pages"):
        reference_pages.key_rows("run", Holed)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 2**31}, "whole number >= 1, < 2147483648"),
        ({"enum": ["a", "b"], "type": "string"}, '`"a"`, `"b"`'),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 0.0}, {"type": "null"}]}, "number > 0"),
        ({"type": "array", "items": {"type": "string"}}, "list of text"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "table of number"),
        ({"type": "string", "pattern": "^(a|b)$"}, "text as `^(a\\|b)$`"),
        ({}, "any value"),
    ],
)
def test_a_type_is_told_in_words(schema: dict[str, object], told: str) -> None:
    """With its bounds."""
    assert reference_pages.type_of(schema) == told


def test_text_that_markdown_would_read_is_escaped_outside_code() -> None:
    """A bar ends a cell anywhere; a smaller-than sign begins a tag only in prose."""
    assert reference_pages.cell("a | b\n < c `<d|e>`") == "a \\| b &lt; c `<d\\|e>`"
