"""The day that chat templates print (Llama 3.2, Mistral Small 3, SmolLM3): a run keeps the day on which it began.

By their own clocks the processes of a run would render other prompts after midnight, and so would a resumed run and an
evaluation on another day.
"""

from contextlib import suppress
from datetime import date
from pathlib import Path

from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.errors import ModelFolderError
from mrl.models.chat_template import read_template


def dated(config: RunConfig, earlier: RunConfig | None = None) -> RunConfig:
    """Return `config` with `prompt.today` of the policies that left it out: the day in `earlier`, else today.

    A policy without a day in `earlier` stays without: runs of mrl 0.1 kept no day, and print the current one. A policy
    whose template is not there yet, prints no day or cannot be read gets none.
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
