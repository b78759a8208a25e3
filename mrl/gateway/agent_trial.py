"""Check of an agent before a run, in a process of its own.

The module of a function is imported. A program is started for a first row, and has to ask something.
"""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

from mrl.config.schema import RunConfig
from mrl.config.task_tables import TaskTable
from mrl.errors import MissingError, TaskError
from mrl.gateway.agent_children import MODULE
from mrl.gateway.agent_network import BASE_URL
from mrl.gateway.agent_process import ALL
from mrl.gateway.agent_programs import LOOK_S, kill_all, last_line, limited, variables
from mrl.gateway.agent_start import API_KEY
from mrl.parent_death import command
from mrl.tasks.environments.environment_trial import tried_in_process
from mrl.tasks.sources import open_source

START_S = 60.0
"""Seconds that a program is watched for its first request."""


def check_agents(config: RunConfig, on_missing: Callable[[MissingError], None]) -> None:
    """Check the agents of all tasks. Raises TaskError for the first that can be no agent of this run.

    A package that is not installed is told to `on_missing`.
    """
    for task, table in config.tasks.items():
        if table.command:
            check_program(task, table, seed=config.pool.seed)
        if table.is_function:
            try:
                if check_agent(task, table):
                    _check_together(config, task)
            except MissingError as missing:
                on_missing(missing)


def check_agent(task: str, table: TaskTable) -> bool:
    """Whether the task's function plays with all policies at once.

    Raises TaskError for a function that can be no agent, MissingError without the package of its client.
    """
    where = f"tasks.{task}.dataset"
    if importlib.util.find_spec("openai") is None:
        what = "the package openai, with which agents query policies, is not installed"
        raise MissingError(what, where=where, cure="pip install 'mrl[agents]'")
    reason, said = tried_in_process(MODULE, "--check", table.dataset)
    if reason:
        wanted = "an async function (client, row) in a module beside the configuration, installed, or on PYTHONPATH"
        raise TaskError(f"not usable as an agent: {reason}", where=where, got=table.dataset, wanted=wanted)
    return said.split()[-1:] == [ALL]


def check_program(task: str, table: TaskTable, *, seed: int) -> None:
    """Start a task's program for one row. Raises TaskError for a program that is not there, or ends before it asks."""
    where, program = f"tasks.{task}.command", table.command[0]
    if shutil.which(program) is None:
        wanted = "a program on PATH, or the path to a program"
        raise TaskError("program not found", where=where, got=program, wanted=wanted)
    item = next(iter(open_source(task, table, seed=seed).items(1)))
    row = {"seed": item.number, **json.loads(item.row)}
    with socket.create_server(("127.0.0.1", 0)) as asked, tempfile.TemporaryFile() as said:
        url = f"http://127.0.0.1:{asked.getsockname()[1]}/v1"
        told = {BASE_URL: url, API_KEY: "none", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        environment = os.environ | told | variables("policy", "none", row)
        argv = command(os.getpid(), tuple(limited(table)))
        nothing = subprocess.DEVNULL
        process = subprocess.Popen(
            argv, stdin=nothing, stdout=nothing, stderr=said, env=environment, start_new_session=True
        )
        try:
            has_asked = _asks(asked, process)
            code = process.poll()
        finally:
            kill_all(process)
        if not has_asked:
            said.seek(0)
            reason = last_line(said.read()) or f"exit code {code}"
            wanted = f"a program that sends requests to the address in {BASE_URL}"
            got = " ".join(table.command)
            what = f"not usable as an agent: the program exits before its first request: {reason}"
            raise TaskError(what, where=where, got=got, wanted=wanted)


def _asks(asked: socket.socket, process: "subprocess.Popen[bytes]") -> bool:
    """Whether the program connects before it ends; a program that runs for START_S without a request counts, too."""
    asked.settimeout(LOOK_S)
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        has_ended = process.poll() is not None
        with suppress(TimeoutError):
            asked.accept()[0].close()
            return True
        if has_ended:
            return False
    return True


def _check_together(config: RunConfig, task: str) -> None:
    """Check that all policies come by the same start states at the same time, as their common episodes need.

    Raises TaskError.
    """
    where, table = f"tasks.{task}.dataset", config.tasks[task]
    what = f"{table.dataset} plays with all policies at once, so they must reach the same start states together"
    if not config.run.sync:
        raise TaskError(
            what,
            where=where,
            got="run.sync = false",
            wanted="policies that train in lockstep",
            cure="set run.sync = true",
        )
    sizes = {name: config.policies[name].rollout.group_size for name in config.learning}
    if len(set(sizes.values())) > 1:
        got = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise TaskError(what, where=where, got=f"rollout.group_size: {got}", wanted="the same size for all policies")
    batches = {name: config.policies[name].learner.fresh_groups for name in config.learning}
    if len(set(batches.values())) > 1:
        got = ", ".join(f"{name} {size}" for name, size in batches.items())
        told = f"learner.prompts_per_step minus reused prompts: {got}"
        raise TaskError(what, where=where, got=told, wanted="the same number for all policies")
    for name in config.learning:
        if config.policies[name].objective.drop_uniform_groups:
            got = f"policies.{name}.objective.drop_uniform_groups = true"
            raise TaskError(what, where=where, got=got, wanted="drop_uniform_groups = false for all policies")
    if config.pool.keep_solved < 1 or config.pool.keep_hopeless < 1:
        raise TaskError(
            what,
            where=where,
            got="a curriculum that skips prompts",
            wanted="pool.keep_solved = 1, pool.keep_hopeless = 1",
        )
