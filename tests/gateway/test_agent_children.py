"""Processes of agents: started once each, started again, and given up where they end again and again."""

import asyncio
import time
from pathlib import Path

import pytest
from aiohttp import web

from mrl.config.load import validate
from mrl.config.overrides import apply_overrides, parse_overrides
from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.gateway import agent_children
from mrl.gateway.agent_children import MAX_ENDS_IN_A_ROW, AgentChildren
from mrl.gateway.agent_network import KEY, URL
from mrl.gateway.agent_start import AgentStarts
from mrl.gateway.agent_trial import check_agent, check_agents
from mrl.gateway.session_registry import SessionRegistry


def tasks_of(dataset, **more):
    """One task of agents."""
    return {"sums": TaskTable(source="agent", dataset=dataset, **more)}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where modules of agents lie."""
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))
    return tmp_path


async def until(condition, what):
    """Look again and again."""
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.05)


def tended(tasks, work):
    """What `work` does with the processes of these tasks, over a gateway that answers nothing."""

    async def whole():
        runner = web.AppRunner(web.Application())
        await runner.setup()
        starts, registry = AgentStarts(runner, "http://127.0.0.1:9/v1"), SessionRegistry(idle_s=60.0)
        children = AgentChildren(tasks, starts, registry, key="secret")
        try:
            await work(children)
        finally:
            children.close()
            await runner.cleanup()
        assert children.num_alive == 0

    asyncio.run(whole())


def test_processes_are_told_where_the_gateway_is_and_end_with_it(folder):
    """As many as the task says; none for agents from outside."""
    (folder / "my_agents.py").write_text(
        f"import os\nopen(f'{folder}/{{os.getpid()}}', 'w').write(os.environ['{URL}'] + ' ' + os.environ['{KEY}'])\n"
        "async def play(client, row): ...\n"
    )
    tasks = tasks_of("my_agents:play", agent_processes=2) | {"quiz": TaskTable(source="agent", dataset="outside")}
    told = "http://127.0.0.1:9/v1 secret"

    async def work(children):
        await children.tend()
        await until(lambda: len(list(folder.glob("[0-9]*"))) == 2, "both start")
        await children.tend()
        assert children.num_alive == 2
        await until(lambda: {file.read_text() for file in folder.glob("[0-9]*")} == {told}, "told")

    tended(tasks, work)


def test_one_that_ends_is_started_again_and_at_last_given_up(folder, monkeypatch):
    """The run ends with the task, and not with silence."""
    (folder / "my_agents.py").write_text("raise SystemExit(3)\nasync def play(client, row): ...\n")
    monkeypatch.setattr(agent_children, "PAUSE_S", 0.01)

    async def work(children):
        while True:
            await children.tend()
            await asyncio.sleep(0.05)

    with pytest.raises(TaskError, match=f"exited {MAX_ENDS_IN_A_ROW} times in a row"):
        tended(tasks_of("my_agents:play"), work)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("", "has no play"),
        ("import nothing_like_it\n", "No module named 'nothing_like_it'"),
        ("def play(client, row): ...\n", "is not an async function"),
        ("async def play(client): ...\n", r"cannot be called with \(client, row\)"),
    ],
)
def test_a_function_that_can_be_no_agent_is_told_before_the_run(folder, code, words):
    """In one line, with the key."""
    (folder / "my_agents.py").write_text(code)
    with pytest.raises(TaskError, match=words) as found:
        check_agent("sums", tasks_of("my_agents:play")["sums"])
    assert "tasks.sums.dataset" in str(found.value)


@pytest.fixture
def config():
    """A synchronous run of two policies that meet at every start state."""
    return validate(
        {
            "run": {"name": "r", "steps": 1, "sync": True},
            "tasks": {"sums": {"source": "agent", "dataset": "my_agents:play", "options": {"size": 9}}},
            "policies": {name: {"model": "nowhere", "rollout": {"group_size": 4}} for name in ("qwen", "llama")},
        },
        where="test",
    )


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([], ""),
        (["--run.sync", "false"], "got 'run.sync = false'"),
        (["--policies.qwen.rollout.group_size", "8"], "the same size for all policies"),
        (["--policies.qwen.learner.prompts_per_step", "3"], "the same number for all policies"),
        (["--policies.llama.objective.drop_uniform_groups", "true"], "drop_uniform_groups"),
        (["--pool.keep_solved", "0.5"], "a curriculum"),
    ],
)
def test_policies_that_one_agent_plays_together_have_to_meet(folder, config, words, refusal):
    """One that goes its own way would wait for the other until its episodes fail."""
    (folder / "my_agents.py").write_text("async def play(clients, row): ...\n")
    tables = apply_overrides(config.model_dump(mode="json", exclude_unset=True), parse_overrides(words))
    changed = validate(tables, where="test")
    if not refusal:
        check_agents(changed, pytest.fail)
        return
    with pytest.raises(TaskError, match=refusal):
        check_agents(changed, pytest.fail)
    (folder / "my_agents.py").write_text("async def play(client, row): ...\n")
    check_agents(changed, pytest.fail)
