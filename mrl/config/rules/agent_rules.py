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
    spot = f"tasks.{task}.command"
    if table.command and table.source != "agent":
        cure = f'set tasks.{task}.source = "agent", or remove {spot}'
        what = f'{spot}: requires source = "agent"'
        raise ConfigError(what, got=f"source = {table.source!r}", cure=cure)
    if table.command and table.dataset != COMMAND:
        cure = f"remove tasks.{task}.dataset or {spot}"
        raise ConfigError(f"{spot}: cannot be combined with a dataset", got=f"dataset = {table.dataset!r}", cure=cure)
    if table.source == "agent" and table.dataset == COMMAND and not table.command:
        cure = f'set {spot}, for example to ["python", "my_agent.py"]'
        raise ConfigError(f"{spot}: missing", got="no command", wanted="a program with its arguments", cure=cure)


def _refuse_in_sync(task: str, table: TaskTable) -> None:
    """Raise ConfigError: a synchronous run samples nothing before all episodes are begun."""
    why = "programs run only a few at a time" if table.command else "agents from outside connect at any time"
    raise ConfigError(
        f"run.sync: a synchronous run starts all episodes at once, but {why}",
        got=f"tasks.{task}.command" if table.command else f'tasks.{task}.dataset = "outside"',
        wanted="a function, which the run starts itself",
        cure="set --run.sync false",
    )
