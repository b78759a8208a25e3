"""The page on agents: its agent plays under the configuration that it gives."""

import asyncio
import sys
import tomllib

from mrl.config.task_tables import TaskTable
from mrl.gateway.agent_process import Player, named_agent
from mrl.gateway.agent_programs import AgentPrograms
from mrl.gateway.agent_start import AgentStarts
from mrl.gateway.agent_trial import check_agent, check_program
from mrl.tasks.environments.contract import PolicyTurn
from mrl.tasks.sources import open_source
from tests.gateway.test_routes import KEY, elsewhere, run
from tests.support.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
FUNCTIONS = "\n".join(block for block in blocks(PAGE, "python") if "async def" in block)
(PROGRAM,) = [block for block in blocks(PAGE, "python") if "MRL_ROW" in block]
(NAMING,) = [block for block in blocks(PAGE, "python") if "MRL-Session" in block]


def test_the_agent_of_the_page_plays(tmp_path, monkeypatch):
    """It asks for the sum of its row, and gives 1 for it."""
    (tmp_path / "my_agents.py").write_text(FUNCTIONS)
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_agents", raising=False)
    (text,) = [block for block in blocks(PAGE, "toml") if "dataset" in block]
    table = TaskTable(**tomllib.loads(text)["tasks"]["sums"])
    check_agent("sums", table)
    assert len(list(open_source("sums", table, seed=1).items(9))) == 2000

    async def script(rig, http):
        playing = asyncio.ensure_future(Player(named_agent(table.dataset), "sums", rig.client(KEY)).play(http))
        seat = rig.seat("sums")
        first = await elsewhere(seat.reset, 47, {})
        last = await elsewhere(seat.step, PolicyTurn(" 11"))
        playing.cancel()
        return first.messages[0].content, last.reward

    assert run(tmp_path, script) == ("What is 7 + 4?", 1.0)


def test_the_client_of_the_page_names_its_session(tmp_path, monkeypatch):
    """With the files of the run, which the gateway of the test has written where the page looks for them."""
    folder = tmp_path / "runs" / "sums"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    async def script(rig, http):
        (folder / "keys" / "gateway.key").write_text(f"{KEY}\n")
        playing = asyncio.ensure_future(elsewhere(exec, NAMING, {}))
        seat = rig.seat("sums")
        first = await elsewhere(seat.reset, 47, {})
        names = list(rig.registry._taken)
        last = await elsewhere(seat.step, PolicyTurn("11"))
        await playing
        return names, first.messages[0].content, last.reward

    assert run(folder, script) == (["player-7"], "What is 7 + 4?", 1.0)


def test_the_debate_of_the_page_trains_both(tmp_path, monkeypatch):
    """Each hears what the other said; one lets itself be talked out of the right answer."""
    (tmp_path / "my_agents.py").write_text(FUNCTIONS)
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_agents", raising=False)

    async def script(rig, http):
        playing = asyncio.ensure_future(Player(named_agent("my_agents:debate"), "sums", rig.client(KEY)).play(http))

        def episode(policy, answers):
            seat = rig.seat("sums", policy)
            turns = [seat.reset(47, {}), *(seat.step(PolicyTurn(answer)) for answer in answers)]
            return turns[0].messages[0].content, turns[1].messages[0].content, turns[2].reward

        found = await asyncio.gather(
            elsewhere(episode, "qwen", ["11", "11"]), elsewhere(episode, "llama", ["11 ", "12"])
        )
        playing.cancel()
        return found

    asked = "What is 7 + 4?"
    assert run(tmp_path, script) == [(asked, "Not 11?", 1.0), (asked, "Not 11?", 0.0)]


def test_the_planner_of_the_page_begins_a_row_of_its_own(tmp_path, monkeypatch):
    """The expert sees the plan and nothing of how it came about."""
    (tmp_path / "my_agents.py").write_text(FUNCTIONS)
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_agents", raising=False)

    async def script(rig, http):
        player = Player(named_agent("my_agents:plan_and_answer"), "sums", rig.client(KEY))
        playing = asyncio.ensure_future(player.play(http))
        seat = rig.seat("sums")
        await elsewhere(seat.reset, 47, {})
        branch = await elsewhere(seat.step, PolicyTurn("by counting"))
        last = await elsewhere(seat.step, PolicyTurn("11"))
        playing.cancel()
        return branch.begins_row, [one.content for one in branch.messages], last.reward, rig.registry.counts["branches"]

    told = ["You answer with a number.", "7 + 4? by counting"]
    assert run(tmp_path, script) == (True, told, 1.0, 1)


def test_the_agent_of_the_page_that_gives_text_plays(tmp_path, monkeypatch):
    """Its second text is the first with what was said, and what ended it."""
    (tmp_path / "my_agents.py").write_text(FUNCTIONS)
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_agents", raising=False)

    async def script(rig, http):
        playing = asyncio.ensure_future(Player(named_agent("my_agents:add_one"), "sums", rig.client(KEY)).play(http))
        seat = rig.seat("sums")
        first = await elsewhere(seat.reset, 47, {})
        second = await elsewhere(seat.step, PolicyTurn(" 11"))
        last = await elsewhere(seat.step, PolicyTurn(" 12"))
        playing.cancel()
        return first.bare.text, second.bare.text, last.reward

    assert run(tmp_path, script) == ("7 + 4 =", "7 + 4 = 11<|im_end|>\n7 + 4 + 1 =", 1.0)


def test_the_program_of_the_page_plays(tmp_path, monkeypatch):
    """Under the configuration that the page gives, started by the run, with the interpreter of mrl."""
    (tmp_path / "my_agent.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    (text,) = [block for block in blocks(PAGE, "toml") if "command" in block]
    given = tomllib.loads(text)["tasks"]["sums"]
    table = TaskTable(**given | {"command": [sys.executable, *given["command"][1:]], "agent_processes": 1})
    assert (given["command"][0], len(list(open_source("sums", table, seed=1).items(9)))) == ("python", 2000)
    check_program("sums", table, seed=1)

    async def script(rig, http):
        programs = AgentPrograms(
            {"sums": table}, AgentStarts(rig.runner, rig.url), rig.registry, key_of=rig.server.key_of
        )
        try:
            programs.tend()
            seat = rig.seat("sums")
            first = await elsewhere(seat.reset, 47, {})
            last = await elsewhere(seat.step, PolicyTurn(" 11"))
        finally:
            await programs.close()
        return first.messages[0].content, last.reward

    assert run(tmp_path, script) == ("What is 7 + 4?", 1.0)
