"""A trial of an environment before a run: class, first start state, a turn of nonsense, and an end from outside."""

import json
import subprocess
import sys
from concurrent.futures import Future
from contextlib import closing

from mrl.config.task_tables import TaskTable
from mrl.errors import RoleFailed, TaskError
from mrl.tasks.environments.contract import FAILURES, MAX_TURNS, EnvironmentTurn, PolicyTurn
from mrl.tasks.environments.environment_child import START_S
from mrl.tasks.environments.environments import environment_name, pool_of
from mrl.tasks.environments.opening import URLS
from mrl.tasks.sources import open_source

MOST_STATES = 1_000_000
"""Start states of an endless source among which a given one is looked for."""
NONSENSE = "}{ no such answer"
"""A text such as untrained policies write."""


def try_environment(task: str, table: TaskTable, *, seed: int) -> EnvironmentTurn:
    """Return the first turn from the first start state; also try a turn of nonsense, and the end of its episode.

    Raises TaskError, with what is wrong and its cure, for a class that can be no environment, and for an environment
    that fails; MissingError when its rows are not there.
    """
    item = next(iter(open_source(task, table, seed=seed).items(1)))
    name = environment_name(table)
    if not name.startswith(URLS):
        _check_class(task, table, name, item.row)
    with closing(pool_of(table, name)) as pool:
        session = pool.open(item.number, json.loads(item.row))
        first = _turn(task, table, session.first, f"reset of {item.text[:80]!r}")
        said = f"the policy's turn {NONSENSE!r}"
        if not first.done and not _turn(task, table, session.step(PolicyTurn(NONSENSE)), said).done:
            _turn(task, table, session.finish(MAX_TURNS), f"the end of the episode (max_turns) after {said}")
    return first


def first_turn(task: str, table: TaskTable, text: str, *, seed: int) -> EnvironmentTurn:
    """Return the environment's first turn from the start state of this text. Raises TaskError as `try_environment`."""
    items = open_source(task, table, seed=seed).items(MOST_STATES)
    item, name = next(item for item in items if item.text == text), environment_name(table)
    with closing(pool_of(table, name)) as pool:
        return _turn(task, table, pool.open(item.number, json.loads(item.row)).first, f"reset of {item.text[:80]!r}")


def _check_class(task: str, table: TaskTable, name: str, row: str) -> None:
    reason, _ = tried_in_process("mrl.tasks.environments.opening", name, row)
    if reason:
        wanted = "a class in a module that is installed, on PYTHONPATH, or beside the configuration file"
        raise TaskError(f"not a valid environment: {reason}", where=f"tasks.{task}.dataset", wanted=wanted)


def tried_in_process(module: str, *words: str) -> tuple[str, str]:
    """Run a module that imports a user's code; return why it fails ("" if it does not), and what it prints."""
    try:
        trial = subprocess.run(
            (sys.executable, "-m", module, *words), capture_output=True, timeout=START_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing the module takes longer than {START_S:.0f} s", ""
    if trial.returncode == 0:
        return "", trial.stdout.decode(errors="replace")
    said = trial.stderr.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(said) if line.strip()), f"exit code {trial.returncode}"), ""


def _turn(task: str, table: TaskTable, future: "Future[EnvironmentTurn]", asked: str) -> EnvironmentTurn:
    try:
        turn = future.result(2 * START_S + 2 * table.episode_s)
    except RoleFailed as error:
        raise TaskError(str(error), where=f"tasks.{task}.dataset") from None
    if turn.has_failed:
        raise TaskError(
            f"the environment {table.dataset} failed at {asked}",
            where=f"tasks.{task}.dataset",
            got=f"{turn.reason}: {turn.words}",
            wanted="text messages, and a finite reward at the end, for any text of a policy",
            cure=f"fix the environment: {FAILURES[turn.reason]}",
        )
    return turn
