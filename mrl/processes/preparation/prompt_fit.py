"""Check that every policy can be asked the pool's prompts: its template takes them, and they fit into its context.

Tokens are counted with the tokenizer's own file. The engine's count differs by special tokens at most, and is checked
once more when a worker starts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, MissingError, ModelFolderError
from mrl.hub_names import download
from mrl.models.chat_template import (
    CONFIG,
    FILE,
    ChatTemplate,
    bos_of,
    chat_sign,
    messages_of,
    plain_text,
    read_template,
)
from mrl.processes.preparation.hub_models import named
from mrl.processes.preparation.model_folder import context_tokens
from mrl.tasks.pool import Prompt

if TYPE_CHECKING:
    from mrl.models.turn_renderer import TurnRenderer
    from mrl.tasks.environments.contract import EnvironmentTurn

BY_FAMILY = "set policies.X.prompt.family, if the package renderers has the model's (pip install 'mrl[renderers]')"


@dataclass(frozen=True, slots=True)
class Limit:
    """Most tokens of a prompt with its answer, and the key that sets the limit."""

    tokens: int
    key: str
    is_models: bool


def check_prompts(config: RunConfig, name: str, prompts: Sequence[Prompt], on_note: Callable[[str], None]) -> None:
    """Raises ModelFolderError or ConfigError where a policy cannot be asked `prompts`.

    The policy's folder is there. `on_note` is told how a policy without a template is asked. A made policy is asked in
    plain text, for which it was made.
    """
    policy = config.policies[name]
    folder = Path(policy.model)
    _check_bridges(config, name, prompts, on_note)
    prompts = [prompt for prompt in prompts if not config.tasks[prompt.task].is_played]
    template = read_template(folder, policy.prompt)
    if template is None and policy.prompt.has_messages:
        raise _without_template(name, policy, folder)
    if template is None and policy.make is None:
        _check_plain(name, policy, folder, prompts, on_note)
    rendered: list[str] = []
    if template is not None:
        _check_options(name, policy, template)
        if template.prints_day and policy.prompt.today:
            on_note(
                f"policies.{name}.prompt.today = {policy.prompt.today}: the chat template puts this date in each prompt"
            )
        for prompt in _one_of_each(prompts):
            try:
                rendered.append(template.render(prompt.content))
            except ModelFolderError as error:
                where = f"policies.{name}: {error.where}"
                got = f"{error.got} (a prompt of {prompt.task})"
                raise ModelFolderError(error.what, where=where, got=got, wanted=error.wanted, cure=error.cure) from None
            _check_messages(name, policy, prompt, rendered[-1])
    _check_bos(name, policy, prompts, template, rendered)
    limits = [limit for limit in _limits(name, policy, folder) if limit.tokens]
    if limits:
        _check_lengths(config, name, prompts, template, min(limits, key=lambda limit: limit.tokens))


def _check_bridges(config: RunConfig, name: str, prompts: Sequence[Prompt], on_note: Callable[[str], None]) -> None:
    """Check that the policy's template goes on from environments' first messages and can call their tools."""
    states = {prompt.task: prompt for prompt in prompts if config.tasks[prompt.task].is_played}
    policy = config.policies[name]
    history = f"policies.{name}.prompt.history"
    is_history_given = "history" in policy.prompt.model_fields_set
    if not states and is_history_given:
        on_note(f"{history}: has no effect, because no task has episodes")
    if not states and not policy.prompt.family:
        return
    from mrl.alignment.receiver import load_receiver
    from mrl.models.families.family_renderer import turn_renderer_of
    from mrl.processes.episode_setup import own_syntax
    from mrl.tasks.environments.environment_trial import first_turn
    from mrl.tasks.environments.tool_syntax import NONE

    try:
        folder, family = Path(policy.model), policy.prompt.family
        eos_ids = load_receiver(folder).eos_ids if family else ()
        renderer = turn_renderer_of(folder, policy.prompt, eos_ids=eos_ids)
        renderer.check(has_tools=bool(family) and own_syntax(renderer).name == family)
        if states:
            _tell_history(history, policy, renderer, is_given=is_history_given, on_note=on_note)
        for task, state in states.items():
            if config.tasks[task].source == "agent":  # an agent names its tools only when it asks
                continue
            turn = first_turn(task, config.tasks[task], str(state.content), seed=config.pool.seed)
            if not turn.tools:
                continue
            renderer.check(has_tools=True)
            if own_syntax(renderer) is NONE:
                raise renderer.refused(
                    f"has no tool-call format that mrl can parse, but tasks.{task} has tools",
                    cure="" if family else BY_FAMILY,
                )
            if renderer.template:
                _check_shown(renderer, task, turn)
    except (ModelFolderError, ConfigError, MissingError) as error:
        where = f"policies.{name}{'.' if error.where.startswith('prompt.family') else ': '}{error.where}"
        told = type(error)(error.what, where=where, got=error.got, wanted=error.wanted, cure=error.cure)
        raise told from None
    if family:
        on_note(_by_family(f"policies.{name}.prompt.family", renderer, bool(states), is_served=config.gateway.serve))


def _check_shown(renderer: "TurnRenderer", task: str, turn: "EnvironmentTurn") -> None:
    """Raises ModelFolderError for a template that leaves a tool out: the policy would not know of it."""
    shown = renderer.text(renderer.opening(turn.messages, [tool.as_chat() for tool in turn.tools]).tolist())
    for tool in turn.tools:
        if tool.name not in shown:
            raise renderer.refused(f"does not show the tool {tool.name} of tasks.{task}")


def _tell_history(
    key: str, policy: PolicyTable, renderer: "TurnRenderer", *, is_given: bool, on_note: Callable[[str], None]
) -> None:
    """Tell what the policy sees of the reasoning of its earlier turns, where that is not all or the key was given."""
    if not renderer.template:
        if is_given:
            on_note(f"{key}: has no effect, because the model has no chat template")
    elif not renderer.drops_reasoning:
        if is_given:
            on_note(f"{key}: has no effect, because the chat template keeps the reasoning of earlier turns")
    elif policy.prompt.history == "template":
        on_note(
            f"{key} = 'template': the chat template drops the reasoning of earlier turns, so an episode becomes "
            "several rows; 'sampled' keeps it in one"
        )


def _by_family(key: str, renderer: "TurnRenderer", is_played: bool, *, is_served: bool) -> str:
    """Return in words what a policy's family is used for: in episodes, or in requests at the gateway."""
    from mrl.models.families.family_renderer import FamilyTurnRenderer
    from mrl.models.families.renderers_package import TRIED
    from mrl.processes.episode_setup import own_syntax

    assert isinstance(renderer, FamilyTurnRenderer), "it names a family"
    uses = [f"continues after messages of role {role}" for role in sorted(renderer.bridged)]
    uses += ["parses tool calls"] * (own_syntax(renderer).name == renderer.family)
    if not uses:
        return f"{key}: has no effect, because the chat template alone provides all that is used"
    if not is_played and not is_served:
        return f"{key}: has no effect, because no task has episodes and the gateway serves nobody"
    where = "" if is_played else ", only for gateway requests (no task has episodes)"
    return f"{key}: renderers {TRIED} {' and '.join(uses)}{where}; the chat template does the rest"


def _check_plain(
    name: str, policy: PolicyTable, folder: Path, prompts: Sequence[Prompt], on_note: Callable[[str], None]
) -> None:
    """Check a model without a chat template: it must not be trained to chat, and prompts must be plain text."""
    where = f"policies.{name}.model = {policy.model!r}"
    if sign := chat_sign(folder, policy.source.partition("@")[0]):
        get = "choose a revision that has one" if named(policy) else download(policy.source, folder, FILE, CONFIG)
        raise ModelFolderError(
            "the model is a chat model, but its folder has no chat template",
            where=where,
            got=sign,
            wanted=f"{FILE}, or chat_template in {CONFIG}",
            cure=f"{get}, or choose a base model",
        )
    for prompt in prompts:
        plain_text(prompt.content, where=f"{where}, tasks.{prompt.task}")
    on_note(f"{where}: no chat template; every prompt is sent as plain text followed by a line break")


def _without_template(name: str, policy: PolicyTable, folder: Path) -> ModelFolderError:
    given = policy.prompt.model_dump(exclude_defaults=True)
    keys = [key for key in ("system", "few_shot", "template_options") if key in given]
    return ModelFolderError(
        f"policies.{name}.prompt.{keys[0]}: needs a chat template, and the model has none",
        where=str(folder),
        wanted=f"{FILE}, or chat_template in {CONFIG}",
        cure=f"set policies.{name}.prompt.chat_template to a file, or leave {' and '.join(keys)} out",
    )


def _check_options(name: str, policy: PolicyTable, template: ChatTemplate) -> None:
    for option in template.unread_options():
        raise ModelFolderError(
            f"policies.{name}.prompt.template_options.{option}: the chat template does not use this option",
            where=_template_of(name, policy),
            got=f"{option} = {policy.prompt.template_options[option]!r}",
            wanted="a variable of the template",
            cure="leave it out, or look up the names of its options in the template",
        )


def _check_messages(name: str, policy: PolicyTable, prompt: Prompt, rendered: str) -> None:
    """Raises ModelFolderError for a template that leaves a message out; white space around a message may go."""
    messages = messages_of(prompt.content, policy.prompt)
    given = {policy.prompt.system: "system message", **{shot.user: "question" for shot in policy.prompt.few_shot}}
    given |= {shot.assistant: "answer" for shot in policy.prompt.few_shot}
    for content in (message["content"] for message in messages):
        if content in given and content.strip() not in rendered:
            key = "system" if content == policy.prompt.system else "few_shot"
            raise ModelFolderError(
                f"policies.{name}.prompt.{key}: the chat template leaves out the {given[content]}, or part of it",
                where=_template_of(name, policy),
                got=f"{content[:60]} (a prompt of {prompt.task})",
                wanted="a template that renders every message in full",
                cure=f"leave it out, or set policies.{name}.prompt.chat_template to such a template",
            )


def _check_bos(
    name: str, policy: PolicyTable, prompts: Sequence[Prompt], template: ChatTemplate | None, rendered: Sequence[str]
) -> None:
    """Raises ModelFolderError where a prompt would open with two BOS. `rendered` has one prompt of each kind."""
    folder = Path(policy.model)
    bos = bos_of(folder)
    if not bos or not (any(text.startswith(bos) for text in rendered) if template else _adds_bos(folder, bos)):
        return
    opening = (messages_of(prompt.content, policy.prompt)[0]["content"] for prompt in prompts)
    found = next((prompt for prompt, text in zip(prompts, opening, strict=True) if text.startswith(bos)), None)
    doubled = next((text for text in rendered if text.startswith(2 * bos)), "")
    if found is None and not doubled:
        return
    prompts_of = f"the prompts{f' of {found.task}' if found else ''}"
    is_systems = policy.prompt.system.startswith(bos)
    cure = f"remove {bos} from the beginning of {f'policies.{name}.prompt.system' if is_systems else prompts_of}"
    raise ModelFolderError(
        f"policies.{name}: a prompt would begin with two BOS tokens",
        where=_template_of(name, policy) if template else str(folder),
        got=doubled[:60] if found is None else _shown(found)[:60],
        wanted=f"one {bos}, which the {'template' if template else 'tokenizer'} adds",
        cure="remove one of them from the template" if found is None else cure,
    )


def _shown(prompt: Prompt) -> str:
    return prompt.content if isinstance(prompt.content, str) else prompt.content[0][1]


def _adds_bos(folder: Path, bos: str) -> bool:
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        return False
    tokens: list[str] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").tokens
    return tokens[:1] == [bos]


def _template_of(name: str, policy: PolicyTable) -> str:
    """Return the key or the file that holds a policy's template."""
    if policy.prompt.chat_template:
        return f"policies.{name}.prompt.chat_template"
    file = Path(policy.model) / FILE
    return str(file if file.is_file() else file.with_name(CONFIG))


def _one_of_each(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Yield one prompt of every task and order of roles: templates depend on roles, seldom on texts."""
    seen = set()
    for prompt in prompts:
        roles = tuple(role for role, _ in prompt.content) if isinstance(prompt.content, tuple) else ()
        if (kind := (prompt.task, roles)) not in seen:
            seen.add(kind)
            yield prompt


def _limits(name: str, policy: PolicyTable, folder: Path) -> Iterator[Limit]:
    rollout = policy.rollout
    yield Limit(context_tokens(folder), f"policies.{name}.rollout.max_new_tokens", True)
    if rollout.engine != "embedded" and not rollout.server.url:
        yield Limit(rollout.server.context_tokens, f"policies.{name}.rollout.server.context_tokens", False)
    if not policy.frozen:  # + 1: the answer's last token is predicted and is no input
        yield Limit(policy.learner.microbatch_tokens + 1, f"policies.{name}.learner.microbatch_tokens", False)


def _check_lengths(
    config: RunConfig, name: str, prompts: Sequence[Prompt], template: ChatTemplate | None, limit: Limit
) -> None:
    """Raises ConfigError where prompts are too long; its message tells how many, and by how much."""
    policy = config.policies[name]
    answer, room = policy.rollout.max_new_tokens, limit.tokens - policy.rollout.max_new_tokens
    texts = [_rendered(prompt, template, policy.prompt.assistant_prefill) for prompt in prompts]
    # A token has at least one byte, so most prompts need not be tokenized at all.
    doubtful = [place for place, text in enumerate(texts) if len(text.encode("utf-8", "replace")) > room]
    sizes = _token_counts(Path(policy.model), [texts[place] for place in doubtful])
    too_long = {place: size for place, size in zip(doubtful, sizes, strict=True) if size > room}
    if not too_long:
        return
    longest = max(too_long, key=lambda place: too_long[place])
    size, task = too_long[longest], prompts[longest].task
    alone = sum(size >= limit.tokens for size in too_long.values())
    what = "prompts exceed this limit by themselves" if alone else "prompts leave too little room for their answers"
    told = f"{alone or len(too_long)} of {len(prompts)} {what}"
    shorter = (
        f"set policies.{name}.rollout.max_new_tokens = {limit.tokens - size}"
        if limit.tokens > size
        else "use shorter prompts"
    )
    cure = f"{shorter}, or set tasks.{task}.max_prompt_chars so that the longest prompts are left out"
    raise ConfigError(
        f"{limit.key}: {told}",
        where=f"policies.{name}",
        got=f"a prompt of {task} with {size} tokens and max_new_tokens = {answer}",
        wanted=f"at most {limit.tokens} together" + ", the context length of the model" * limit.is_models,
        cure=cure if limit.is_models else f"set {limit.key} = {size + answer}, or {cure}",
    )


def _rendered(prompt: Prompt, template: ChatTemplate | None, prefill: str) -> str:
    return template.render(prompt.content) if template else plain_text(prompt.content, where="", prefill=prefill)


def _token_counts(folder: Path, texts: list[str]) -> list[int]:
    from tokenizers import Tokenizer

    if not texts:
        return []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [len(encoded.ids) for encoded in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
