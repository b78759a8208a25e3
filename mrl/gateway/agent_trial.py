"""An agent looked at before a run: its module is imported and its function found, in a process of its own."""

import importlib.util
from collections.abc import Callable

from mrl.config.schema import RunConfig
from mrl.config.task_tables import TaskTable
from mrl.errors import MissingError, TaskError
from mrl.gateway.agent_children import MODULE
from mrl.gateway.agent_process import ALL
from mrl.tasks.environments.environment_trial import tried_in_process


def check_agents(config: RunConfig, on_missing: Callable[[MissingError], None]) -> None:
    """Raises TaskError for the first function that can be no agent of this run; a package that is not there is told."""
    for task, table in config.tasks.items():
        if table.source == "agent" and not table.is_outside:
            try:
                if check_agent(task, table):
                    _check_together(config, task)
            except MissingError as missing:
                on_missing(missing)


def check_agent(task: str, table: TaskTable) -> bool:
    """Whether the function plays with all policies at once.

    Raises TaskError for one that can be no agent, MissingError without the package of its client.
    """
    where = f"tasks.{task}.dataset"
    if importlib.util.find_spec("openai") is None:
        what = "the package openai, by which agents ask policies, is not installed"
        raise MissingError(what, where=where, cure="pip install 'mrl[agents]'")
    reason, said = tried_in_process(MODULE, "--check", table.dataset)
    if reason:
        wanted = "an async function (client, row) in a module beside the configuration, installed, or on PYTHONPATH"
        raise TaskError(f"no agent: {reason}", where=where, got=table.dataset, wanted=wanted)
    return said.split()[-1:] == [ALL]


def _check_together(config: RunConfig, task: str) -> None:
    """Policies whose episodes wait for each other have to come by the same start states, at the same time."""
    where, table = f"tasks.{task}.dataset", config.tasks[task]
    what = f"{table.dataset} plays with all policies at once, and they have to meet at every start state"
    if not config.run.sync:
        raise TaskError(
            what, where=where, got="run.sync = false", wanted="policies that step together", cure="--run.sync true"
        )
    sizes = {name: config.policies[name].rollout.group_size for name in config.learning}
    if len(set(sizes.values())) > 1:
        got = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise TaskError(what, where=where, got=f"rollout.group_size: {got}", wanted="one size for all policies")
    batches = {name: config.policies[name].learner.prompts_per_step for name in config.learning}
    if len(set(batches.values())) > 1:
        got = ", ".join(f"{name} {size}" for name, size in batches.items())
        raise TaskError(what, where=where, got=f"learner.prompts_per_step: {got}", wanted="one number for all policies")
    for name in config.learning:
        if config.policies[name].objective.drop_uniform_groups:
            got = f"policies.{name}.objective.drop_uniform_groups = true"
            raise TaskError(what, where=where, got=got, wanted="no policy that goes on to other prompts by itself")
    if config.pool.keep_solved < 1 or config.pool.keep_hopeless < 1:
        raise TaskError(what, where=where, got="a curriculum", wanted="pool.keep_solved = 1, pool.keep_hopeless = 1")
