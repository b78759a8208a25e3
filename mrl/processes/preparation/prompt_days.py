"""The day that chat templates print (Llama 3.2, Mistral Small 3, SmolLM3): a run keeps the one on which it began.

By their own clocks processes of one run would ask otherwise after midnight, and so would a resumed run and an
evaluation of another day.
"""

from contextlib import suppress
from datetime import date
from pathlib import Path

from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.errors import ModelFolderError
from mrl.models.chat_template import read_template


def dated(config: RunConfig, earlier: RunConfig | None = None) -> RunConfig:
    """`config` with `prompt.today` of the policies that left it out: what `earlier` has, else the day of now.

    A policy that `earlier` had without a day goes on without one: runs of mrl 0.1 kept none, and print that of now. A
    template that is not there yet, or cannot be read, prints none.
    """
    policies = dict(config.policies)
    for name, policy in config.policies.items():
        had = earlier.policies.get(name) if earlier is not None else None
        day = had.prompt.today if had is not None else date.today() if _prints_day(policy) else None
        if policy.prompt.today is None and day is not None:
            prompt = policy.prompt.model_copy(update={"today": day})
            policies[name] = policy.model_copy(update={"prompt": prompt})
    return config.model_copy(update={"policies": policies})


def _prints_day(policy: PolicyTable) -> bool:
    with suppress(ModelFolderError):
        template = read_template(Path(policy.model), policy.prompt) if policy.model else None
        return template is not None and template.prints_day
    return False
