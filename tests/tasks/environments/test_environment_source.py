"""Start states from files and seeds, and the classes that can be no environment: one line, with its cure."""

import json
from pathlib import Path

import pytest

from mrl.config.task_tables import TaskTable
from mrl.errors import MissingError, TaskError
from mrl.tasks.environments.environment_trial import try_environment
from mrl.tasks.sources import open_source
from mrl.tasks.split import part_of

GOOD = """
class Game:
    def reset(self, word="sun", **row): return word
    def step(self, text): return "no", 0.5, False
"""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Modules beside the configuration."""
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))


def table(tmp_path: Path, text: str = GOOD, name: str = "Game", **keys) -> TaskTable:
    """A task with a class in a module of its own."""
    (tmp_path / "my_games.py").write_text(text)
    keys = {"environment_processes": 1} | keys
    return TaskTable(source="environment", dataset=f"my_games:{name}", **keys)


def states(task: TaskTable) -> list:
    """All of its start states."""
    return list(open_source("game", task, seed=1).items(10))


def test_seeds_and_rows_are_start_states(tmp_path):
    """So many seeds; or the rows of a file, shuffled, those of a second file held out."""
    assert [item.text for item in states(table(tmp_path, options={"size": 3}))] == [
        f"my_games:Game seed {n}" for n in range(3)
    ]
    parts = [part_of(item) for item in states(table(tmp_path, options={"size": 400}))]
    assert 40 <= parts.count("held_out") <= 80
    assert parts.count("train") == 400 - parts.count("held_out")
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"word": f"{name}{n}"}) + "\n" for n in range(5)))
    options = {"data": str(tmp_path / "a.jsonl"), "held_out": str(tmp_path / "b.jsonl"), "reset": {"letters": 3}}
    found = states(table(tmp_path, options=options))
    assert [part_of(item) for item in found] == ["held_out"] * 5 + ["train"] * 5
    assert json.loads(found[0].row) == {"letters": 3, "word": f"b{found[0].number}"}
    assert [item.number for item in found[5:]] != sorted(item.number for item in found[5:])
    assert states(table(tmp_path, options=options)) == found
    with pytest.raises(MissingError, match=r"none\.jsonl"):
        states(table(tmp_path, options={"data": "none.jsonl"}))


def test_a_game_that_does_not_exist_is_told_those_that_do(tmp_path):
    """Neither class, URL nor game."""
    with pytest.raises(TaskError, match="or a game: higher_lower, lookup, maze"):
        open_source("game", TaskTable(source="environment", dataset="higher_low"), seed=1)


RESET = "    def reset(self): return 'x'\n"
STEP = "    def step(self, text): return 'x'\n"
REWARD = "    def get_reward(self): return 1\n"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (STEP, "my_games:Game has no reset; write def reset(self, **row)"),
        (RESET + REWARD, "has neither tools nor step"),
        (RESET + "    def f(self, a: str): ...", "has no get_reward; write"),
        (RESET + REWARD + "    def f(self, a): ...",
         "Game.f cannot be a tool: the argument 'a' has no type hint; write for example a: str, or rename"),
        (RESET + REWARD + "    def f(self, *a: str): ...", "cannot be passed by name"),
        (RESET + REWARD + "    def f(self, a: object()): ...", "Game.f cannot be a tool"),
        (RESET + REWARD + "    def f(self, a: complex): ...", "the argument 'a' has the type complex; wanted str"),
        (STEP + "    def reset(self, city): return 'x'",
         "Game.reset needs 'city', but rows only have seed; give city a default value"),
        (RESET + STEP + "    def __init__(self, n): ...", "cannot be called without arguments"),
        (RESET + "    def step(self): ...", "write def step(self, text)"),
        (RESET + REWARD + "    async def f(self, a: str): ...",
         "my_games:Game.f is async, which is not supported; write def f and use asyncio.run in it, or"
         " rename the method to _f"),
        (RESET + "    async def step(self, text): return 'x'", "my_games:Game.step is async"),
        ("    pass\nGame = 7", "is of type int, not a class"),
        ("    pass\nraise ImportError('no dice')", "the module my_games cannot be imported: ImportError: no dice"),
        ("    pass\ndel Game", "the module my_games has no Game"),
        (REWARD + STEP + "    def reset(self): return 7", "reset returned int"),
        (REWARD + STEP + "    def reset(self): return ''", "reset returned no message"),
        (RESET + "    def step(self, text): return 7", "step returned int"),
        (RESET + "    def step(self, text): return 'x', 'y', True", "is not a number"),
        (RESET + "    def step(self, text): return 1 / 0", "my_games.py:3 in step"),
        (RESET + STEP + "    def get_reward(self): ...",
         "at the end of the episode (max_turns) after the policy's turn '}{ no such answer'; got 'wrong_type: the"
         " reward is None, which is not a number"),
        (RESET + STEP + "    def get_reward(self): return self.won", "'Game' object has no attribute 'won'"),
        (RESET + STEP, "my_games:Game gives no reward, so nothing is learnt; write def get_reward(self) -> float, or"
         " let step return (text, reward, done)"),
        (RESET + "    def step(self, text): return (f'{text}', True) if text else ('x', False)", "gives no reward"),
    ],
)  # fmt: skip
def test_a_class_that_can_be_no_environment_is_one_line(tmp_path, body, told):
    """What is wrong, where, and the cure."""
    with pytest.raises(TaskError) as caught:
        try_environment("game", table(tmp_path, f"class Game:\n{body}"), seed=1)
    assert told in str(caught.value)
    assert "tasks.game.dataset" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "    def step(self, text):\n        if text: return 'x', False\n        return 'won', 1.0, True\n",
        "    def step(self, text):\n        if text: return 'x', False\n        return self.other(text)\n",
        "    def step(self, text):\n        return 'x', *self.rest\n    rest = 0.5, False\n",
        "    step = lambda self, text: ('x', 1.0, True)\n",
        "    def step(self, text): return 'x'\n    def __getattr__(self, name): return lambda: 1.0\n",
    ],
)
def test_a_step_that_may_give_a_reward_is_enough(tmp_path, body):
    """A game without `get_reward`: a return that is not seen to be without one may hold it."""
    assert try_environment("game", table(tmp_path, f"class Game:\n{RESET}{body}"), seed=1).messages


def test_a_good_class_is_tried(tmp_path):
    """Its first message is what a policy will see."""
    first = try_environment("game", table(tmp_path, options={"reset": {"word": "moon"}}), seed=1)
    assert first.messages[0].content == "moon"


def test_a_game_may_wait_in_methods_of_its_own(tmp_path):
    """Only what is called by itself has to be plain; of a game nothing else is a tool."""
    helper = "    async def ask(self): return 'x'\n    def step(self, text): return asyncio.run(self.ask())\n"
    text = f"import asyncio\nclass Game:\n{RESET}{helper}"
    assert try_environment("game", table(tmp_path, text), seed=1).messages[0].content == "x"
