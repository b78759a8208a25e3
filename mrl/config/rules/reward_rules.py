"""Rules on rewards that span several keys of a configuration."""

import re

from mrl.config.schema import RunConfig
from mrl.config.task_tables import JUDGE, TaskTable
from mrl.errors import ConfigError


def check_rewards(config: RunConfig) -> None:
    """Raises ConfigError for a bound of success that failures reach or nothing can, and for weights that none read.

    It is raised for a judge that could not judge, too. A task without a verifier of its own gives rewards of 0 and 1,
    an environment any reward.
    """
    if config.pool.hopeless_rate >= config.pool.solved_rate:
        raise ConfigError(
            "pool.hopeless_rate: a prompt could be solved and hopeless at the same time",
            got=config.pool.hopeless_rate,
            wanted=f"< pool.solved_rate = {config.pool.solved_rate:g}",
        )
    bound = config.run.success_reward
    for name, task in config.tasks.items():
        _check_judge(name, task)
        if task.failed_reward >= bound:
            raise ConfigError(
                f"tasks.{name}.failed_reward: an answer on which the verifier fails would count as a success",
                got=task.failed_reward,
                wanted=f"less than run.success_reward = {bound:g}",
            )
        if task.is_played and task.verifier:
            raise ConfigError(
                f"tasks.{name}.verifier: the environment gives the reward of an episode",
                got=task.verifier,
                wanted="get_reward in the environment's class",
                cure=f"remove tasks.{name}.verifier",
            )
        if not task.own_verifier and not task.is_played and not 0 < bound <= 1:
            raise ConfigError(
                f"run.success_reward: answers of tasks.{name} are rewarded with 0 or 1",
                got=bound,
                wanted="above 0, and at most 1",
                cure=f"give tasks.{name} a verifier of your own, or leave run.success_reward at 1",
            )
        if not task.own_verifier and task.reward_weights:
            raise ConfigError(
                f"tasks.{name}.reward_weights: the data set's own verifier returns no named rewards",
                got=", ".join(task.reward_weights),
                wanted=f"a tasks.{name}.verifier that returns rewards by name",
            )


def _check_judge(name: str, task: TaskTable) -> None:
    table, key = task.judge, f"tasks.{name}.judge"
    if table is None:
        if task.verifier == JUDGE:
            raise ConfigError(f"{key}: missing", wanted="a table with url and model")
        return
    if task.verifier != JUDGE or task.evaluator:
        other = "evaluator" if task.evaluator else "verifier"
        cure = f"remove {key} or tasks.{name}.{other}"
        raise ConfigError(f"tasks.{name}.{other}: cannot be combined with a judge", got=getattr(task, other), cure=cure)
    if "{answer}" not in table.template:
        raise ConfigError(f"{key}.template: the judge would not see the answer", wanted="a template with {answer}")
    if table.least >= table.most:
        raise ConfigError(f"{key}.least: not below judge.most", got=table.least, wanted=f"< {table.most:g}")
    try:
        num_groups = re.compile(table.score).groups
    except re.error as error:
        raise ConfigError(f"{key}.score: {error}", got=table.score, wanted="a regular expression") from None
    if num_groups != 1:
        raise ConfigError(
            f"{key}.score: the expression has {num_groups} groups", got=table.score, wanted="one group, the score"
        )
