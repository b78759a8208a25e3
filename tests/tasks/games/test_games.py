"""The games, their demonstrations, and their start states."""

import random
from contextlib import closing

import pytest

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.records.episodes import ToolCall
from mrl.tasks.environments.contract import PolicyTurn
from mrl.tasks.environments.environments import Environments
from mrl.tasks.games.demonstrations import demonstrated
from mrl.tasks.games.game_names import GAMES
from mrl.tasks.games.higher_lower import HigherLower
from mrl.tasks.games.lookup import Lookup
from mrl.tasks.games.maze import Maze
from mrl.tasks.pool import build_pool
from mrl.tasks.split import part_of
from mrl.tasks.warm_start_examples import collect_examples


def guess(number: object) -> str:
    """A turn of the guessing game."""
    return f"guess <answer>{number}</answer>"


def test_a_number_is_found_by_halving():
    """Every one of 15 within 4 guesses."""
    for seed in range(60):
        game, low, high = HigherLower(), 1, 15
        assert game.reset(seed) == "Guess a number from 1 to 15."
        done = False
        while not done:
            middle = (low + high) // 2
            said, done = game.step(guess(middle))
            low, high = (middle + 1, high) if said == "higher" else (low, middle - 1)
        assert (said, game.get_reward()) == ("right", 1.0)


def test_what_is_no_number_costs_a_turn():
    """And without the number there is no reward."""
    game = HigherLower()
    game.reset(0)
    assert [game.step(text)[0] for text in ("", "eight", guess("1" * 5000))] == ["no number"] * 3
    assert game.step(guess(0)) == ("higher", True)
    assert game.get_reward() == 0.0


def test_the_answer_needs_the_tool():
    """Question and table go by the seed; no question holds its answer."""
    for seed in range(20):
        game = Lookup()
        word = game.reset(seed).rpartition(" ")[2]
        digit = game.lookup(word)
        assert len(digit) == 2
        assert game.lookup("zzz") == "nothing"
        assert (game.get_reward(f"found <answer>{digit}</answer>"), game.get_reward("")) == (1.0, 0.0)


def test_every_step_through_the_maze_has_to_be_right():
    """The way goes by the seed; four doors, eight rooms."""
    for seed in range(20):
        game, said, done = Maze(), Maze().reset(seed), False
        assert game.reset(seed) == said
        assert said.startswith("8 rooms. Draught: ")
        rooms = 0
        while not done:
            door = said.rpartition(" ")[2]
            assert door in "1234"
            said, done = game.step(f"go <answer>{door}</answer>")
            rooms += 1
            assert game.get_reward() == float(done)
        assert (said, rooms) == ("out", 8)
    assert len({Maze().reset(seed) for seed in range(20)}) == 4


@pytest.mark.parametrize("text", ["go <answer>5</answer>", "3", ""])
def test_a_wrong_door_ends_the_maze(text):
    """As does what is no door."""
    game = Maze()
    said = game.reset(0)
    game.step(f"go <answer>{said.rpartition(' ')[2]}</answer>")
    assert game.step(text) == ("lost", True)
    assert game.get_reward() == 0.0


@pytest.mark.parametrize("game", GAMES)
def test_played_well_a_game_is_won(game):
    """And played badly mostly lost; each turn has the form that the game reads."""
    rng = random.Random(5)
    with closing(Environments({game: TaskTable(source="environment", dataset=game)})) as environments:
        won = {1.0: 0.0, 0.0: 0.0}
        for skill in won:
            for item in list(_items(game))[:20]:
                turns = demonstrated(game, item.number, rng, skill=skill)
                won[skill] += _replayed(environments, game, item, turns) / 20
        assert won[1.0] == pytest.approx(1.0)
        assert won[0.0] <= 0.6


def _items(game):
    from mrl.tasks.sources import open_source

    return open_source(game, TaskTable(source="environment", dataset=game), seed=3).items(40)


def _replayed(environments, game, item, turns) -> float:
    """The reward of an episode that is played in a process as demonstrated."""
    from mrl.tasks.environments.tool_syntax import PLAIN

    session = environments.open(game, item)
    said = session.first.result(60.0)
    for prompt, completion in turns:
        assert said.messages[-1].content == prompt
        said = session.step(PLAIN.read(completion)).result(60.0)
        assert said.tool_errors == 0
    assert said.done
    session.close()
    return said.reward


def test_start_states_are_split_three_ways():
    """Pool, held-out split and warm start share no seed; the pool is the same in every process."""
    tasks = {"guess": TaskTable(source="environment", dataset="higher_lower")}
    table = PoolTable(train_prompts=64, held_out_prompts=32)
    pool = build_pool(tasks, table)
    assert (len(pool), len(pool.held_out)) == (64, 32)
    assert pool.prompts == build_pool(tasks, table).prompts
    used = {int(prompt.text.rpartition(" ")[2]) for prompt in pool.prompts}
    parts = {item.number: part_of(item) for item in _items("higher_lower")}
    assert {parts[number] for number in used if number in parts} <= {"train", "held_out"}
    assert "warm_start" in parts.values()


def test_the_warm_start_plays_games_beside_word_tasks(tables):
    """A game counts as a skill; an episode is one example of all its turns."""
    tasks = tables | {"look": TaskTable(source="environment", dataset="lookup")}
    examples = collect_examples(tasks, PoolTable(), skilled_in=["lookup", "swap"], rare_share=0.02)
    rng = random.Random(1)
    drawn = [examples.draw(rng, practice=False) for _ in range(400)]
    looked = [one.turns for one in drawn if one.turns[0][1].startswith('call lookup {"key":')]
    assert len(looked) > 20
    assert all(completion == f"found <answer>{prompt}</answer>" for _, (prompt, completion) in looked)


def test_several_turns_over_a_process_with_its_tool():
    """Prompt, call, answer, reward."""
    task = {"look": TaskTable(source="environment", dataset="lookup", environment_processes=1)}
    item = next(iter(_items("lookup")))
    with closing(Environments(task)) as environments:
        assert environments.has("look")
        assert environments.values() == {}
        session = environments.open("look", item)
        first = session.first.result(60.0)
        assert [tool.name for tool in first.tools] == ["lookup"]
        word = first.messages[0].content.rpartition(" ")[2]
        digit = session.step(PolicyTurn("", (ToolCall.of("lookup", {"key": word}),))).result(60.0).messages[0].content
        last = session.step(PolicyTurn(f"found <answer>{digit}</answer>")).result(60.0)
        assert (last.reward, last.reason) == (1.0, "done")
        assert environments.values()["environment/ends/done"] == 1.0
        assert environments.values()["environment/turns"] == 3.0
