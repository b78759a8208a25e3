"""Rules of tasks whose episodes agents play."""

from mrl.config.schema import RunConfig
from mrl.config.task_tables import COMMAND, TaskTable
from mrl.errors import ConfigError


def check_agent_tables(config: RunConfig) -> None:
    """Raises ConfigError for a program beside another source or data set, and for agents that come when they will."""
    for task, table in config.tasks.items():
        _check_command(task, table)
        if config.run.sync and (table.is_outside or table.command):
            _refuse_in_sync(task, table)


def _check_command(task: str, table: TaskTable) -> None:
    what = f"tasks.{task}.command: a program that is the agent of a task"
    if table.command and table.source != "agent":
        cure = f'tasks.{task}.source = "agent"'
        raise ConfigError(what, got=f"source = {table.source!r}", wanted="that of agents", cure=cure)
    if table.command and table.dataset != COMMAND:
        cure = f"leave tasks.{task}.dataset out, or the command"
        raise ConfigError(what, got=f"dataset = {table.dataset!r}", wanted="one of the two", cure=cure)
    if table.source == "agent" and table.dataset == COMMAND and not table.command:
        cure = f'tasks.{task}.command = ["python", "my_agent.py"]'
        raise ConfigError(what, got="no command", wanted="a program and its words", cure=cure)


def _refuse_in_sync(task: str, table: TaskTable) -> None:
    """Raise ConfigError: a synchronous run samples nothing before all episodes are begun."""
    come = "few programs play at a time" if table.command else "agents from outside come when they will"
    raise ConfigError(
        f"run.sync: {come}",
        got=f"tasks.{task}.command" if table.command else f'tasks.{task}.dataset = "outside"',
        wanted="a function that the run starts itself",
        cure="--run.sync false",
    )
