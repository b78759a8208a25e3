"""The prompts of policies as `mrl check --prompts` shows them: as models read them, special tokens included."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.schema import RunConfig
from mrl.report.samples.answer_filter import printable
from mrl.tasks.pool import Prompt

if TYPE_CHECKING:
    from mrl.models.prompting import PromptEncoder


def shown_prompts(config: RunConfig, asked: dict[str, Sequence[Prompt]], count: int) -> Iterator[str]:
    """Yield lines with the first `count` prompts of each policy in `asked`; of other policies, that they lack a model.

    Raises ModelFolderError for a policy that cannot be asked.
    """
    from mrl.models.prompting import PromptEncoder

    for name, policy in config.policies.items():
        if name not in asked:
            yield f"prompts of {name}: the model is not here yet"
            continue
        encoder = PromptEncoder(Path(policy.model), policy.prompt)
        for number, prompt in enumerate(asked[name][:count], start=1):
            title = f"prompt {number} of {name}, of tasks.{prompt.task}"
            if config.tasks[prompt.task].source == "agent":
                yield f"{title}: the first request of its agent, for {prompt.content}"
            elif config.tasks[prompt.task].is_played:
                yield from _opening(title, config, name, prompt)
            else:
                yield from _prompt(title, encoder, prompt)
        if policy.prompt.assistant_prefill:
            yield f"every answer begins with the end of its prompt, {policy.prompt.assistant_prefill!r}"
        if policy.prompt.stop:
            yield f"answers end at {', '.join(map(repr, policy.prompt.stop))} or the EOS token"


def _prompt(title: str, encoder: "PromptEncoder", prompt: Prompt) -> Iterator[str]:
    yield f"{title} ({encoder.token_ids(prompt.content).size} tokens):"
    yield from (f"  | {line}" for line in printable(encoder.shown(prompt.content)).split("\n"))


def _opening(title: str, config: RunConfig, name: str, prompt: Prompt) -> Iterator[str]:
    """Yield an environment's first messages, the prompt of its episodes. Raises TaskError where it fails."""
    from mrl.models.families.family_renderer import turn_renderer_of
    from mrl.tasks.environments.environment_trial import first_turn

    policy = config.policies[name]
    first = first_turn(prompt.task, config.tasks[prompt.task], str(prompt.content), seed=config.pool.seed)
    renderer = turn_renderer_of(Path(policy.model), policy.prompt, eos_ids=())
    ids = renderer.opening(first.messages, [tool.as_chat() for tool in first.tools]).tolist()
    yield f"{title}, start state {prompt.content} ({len(ids)} tokens):"
    yield from (f"  | {line}" for line in printable(renderer.text(ids)).split("\n"))
