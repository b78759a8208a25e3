"""A run whose chat templates print the day keeps the one on which it began."""

from datetime import date
from pathlib import Path

import pytest

from mrl.config.resume import check_same_meaning
from mrl.config.schema import RunConfig
from mrl.processes.preparation.hub_models import pinned
from mrl.processes.preparation.prompt_days import dated
from tests.support.word_runs import word_run

DAY = date(2024, 7, 26)
TODAY = "{% set date_string = date_string or strftime_now('%d %b %Y') %}Today Date: {{ date_string }}"


def config(folder: Path, **prompt: object) -> RunConfig:
    return word_run({"one": {"model": str(folder), "prompt": prompt}}, task="trim")


def day_of(config: RunConfig) -> date | None:
    return config.policies["one"].prompt.today


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "chat_template.jinja").write_text(TODAY)
    return tmp_path


def test_a_run_begins_on_some_day(llama: Path) -> None:
    """By its own template too; one that was given counts."""
    assert day_of(dated(config(llama))) == date.today()
    assert day_of(dated(config(llama / "none", chat_template=TODAY))) == date.today()
    assert day_of(dated(config(llama, today="2024-07-26"))) == DAY


@pytest.mark.parametrize("text", ["{{ messages }}", None])
def test_a_template_that_prints_none_needs_none(tmp_path: Path, text: str | None) -> None:
    """Nor does a model that is not there, or has none."""
    if text is not None:
        (tmp_path / "chat_template.jinja").write_text(text)
    assert day_of(dated(config(tmp_path))) is None


def test_a_run_that_goes_on_keeps_its_day(llama: Path) -> None:
    """And so has the same prompts, as a resumed run must; so do runs that are compared with it."""
    earlier = config(llama, today="2024-07-26")
    again = pinned(config(llama), where="test", earlier=earlier, on_note=pytest.fail)
    assert day_of(again) == DAY
    check_same_meaning(earlier, again, where="test")


def test_a_run_that_began_without_a_day_goes_on_without_one(llama: Path) -> None:
    """As those of mrl 0.1 did, which kept none: another value than theirs would be refused."""
    earlier = config(llama)
    again = pinned(config(llama), where="test", earlier=earlier, on_note=pytest.fail)
    assert day_of(again) is None
    check_same_meaning(earlier, again, where="test")
