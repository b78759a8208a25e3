"""Rules on rewards that span several keys of a configuration."""

from mrl.config.schema import RunConfig
from mrl.errors import ConfigError


def check_rewards(config: RunConfig, where: str) -> None:
    """Raises ConfigError for a bound of success that failures reach, or that nothing can, and weights that none read.

    Without a verifier of its own a task gives 0 and 1, an environment what it likes.
    """
    bound = config.run.success_reward
    for name, task in config.tasks.items():
        if task.failed_reward >= bound:
            raise ConfigError(
                f"tasks.{name}.failed_reward: an answer on which the verifier fails would be a success",
                where=where,
                got=task.failed_reward,
                wanted=f"less than run.success_reward = {bound:g}",
            )
        if task.source == "environment" and task.verifier:
            raise ConfigError(
                f"tasks.{name}.verifier: the environment gives the reward of an episode",
                where=where,
                got=task.verifier,
                wanted="get_reward of the environment's class",
                cure=f"leave out tasks.{name}.verifier",
            )
        if not task.verifier and task.source != "environment" and not 0 < bound <= 1:
            raise ConfigError(
                f"run.success_reward: the answers of tasks.{name} get 0 or 1",
                where=where,
                got=bound,
                wanted="above 0, and at most 1",
                cure=f"give tasks.{name} a verifier of your own, or leave run.success_reward at 1",
            )
        if not task.verifier and task.reward_weights:
            raise ConfigError(
                f"tasks.{name}.reward_weights: the data set's own scorer names no rewards",
                where=where,
                got=", ".join(task.reward_weights),
                wanted=f"tasks.{name}.verifier, which returns them by name",
            )
