"""The page on episodes: its classes run as it says, under the configuration that it gives."""

import tomllib
from contextlib import closing
from pathlib import Path

import pytest

from mrl.config.policy_tables import PromptTable
from mrl.config.task_tables import TaskTable
from mrl.tasks.environments.contract import FAILURES, EnvironmentTurn, PolicyTurn
from mrl.tasks.environments.environment_pool import EnvironmentPool
from mrl.tasks.environments.environment_trial import try_environment
from mrl.tasks.environments.tool_syntax import HERMES, LLAMA3, MISTRAL_CALLS, PLAIN
from tests.support.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "episodes.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's classes in one module."""
    (tmp_path / "my_games.py").write_text("\n".join(blocks(PAGE, "python")))
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))
    return tmp_path


def said(turn: EnvironmentTurn) -> str:
    """The one message of a turn."""
    (message,) = turn.messages
    return message.content


def test_the_game_of_the_page_runs_under_its_configuration(folder):
    """As `mrl check` tries it."""
    task, family, history = blocks(PAGE, "toml")
    assert PromptTable(**tomllib.loads(family)["policies"]["qwen"]["prompt"]).family == "qwen3.5"
    assert PromptTable(**tomllib.loads(history)["policies"]["qwen"]["prompt"]).history == "sampled"
    table = TaskTable(**tomllib.loads(task)["tasks"]["parity"])
    assert said(try_environment("parity", table, seed=1)).endswith("odd or even?")


def test_the_tools_of_the_page_are_called_in_every_syntax_of_its_table(folder):
    """Each row of the table is read to the same call; what goes wrong is told as the page says."""
    rows = [line for line in PAGE.splitlines() if "bread" in line and line.startswith("|")]
    written = [row.replace("\\|", "/").split("`")[1] for row in rows]
    pool = EnvironmentPool("my_games:Shop", processes=1, wall_s=60.0, cpu_s=60.0)
    with closing(pool):
        session = pool.open(0, {"item": "bread"})
        assert session.first.result(60.0).tools[0].description == "Looks up a price."
        for syntax, text in zip((HERMES, LLAMA3, MISTRAL_CALLS, PLAIN), written, strict=True):
            assert said(session.step(syntax.read(text)).result(60.0)) == "2.5"
        gold = PLAIN.read('call price {"name":"gold"}')
        assert said(session.step(gold).result(60.0)) == "error: KeyError: 'gold'"
        assert session.step(PolicyTurn("2.5")).result(60.0).reward == 1.0


def test_every_reason_of_a_failure_is_explained():
    """In the page's table, and no others."""
    rows = PAGE.partition("| reason | what happened |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(FAILURES)
