"""Whether every policy can be asked the prompts of the pool: its template takes them, and they fit into its context.

Counted with the tokenizer's own file; what the engine then counts differs by special tokens at most, and is looked at
once more when a worker starts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, ModelFolderError
from mrl.models.chat_template import CONFIG, FILE, ChatTemplate, chat_sign, plain_text, read_template
from mrl.processes.preparation.hub_models import named
from mrl.processes.preparation.hub_names import download
from mrl.processes.preparation.model_folder import context_tokens

Content = str | tuple[tuple[str, str], ...]


class Asked(Protocol):
    """The part of a prompt that is looked at."""

    @property
    def task(self) -> str:
        """The name of its task."""

    @property
    def content(self) -> Content:
        """Text, or the messages of a conversation."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Tokens of a prompt and its answer, at most, and the key that says so."""

    tokens: int
    key: str
    is_models: bool


def check_prompts(config: RunConfig, name: str, prompts: Sequence[Asked], on_note: Callable[[str], None]) -> None:
    """Raises ModelFolderError, ConfigError; `on_note` is told what is done for want of a template.

    The policy's folder is there. A made policy asks in plain text, for it was made so.
    """
    policy = config.policies[name]
    folder = Path(policy.model)
    template = read_template(folder)
    if template is None and policy.make is None:
        _check_plain(name, policy, folder, prompts, on_note)
    if template is not None:
        for prompt in _one_of_each(prompts):
            try:
                template.render(prompt.content)
            except ModelFolderError as error:
                where = f"policies.{name}: {error.where}"
                got = f"{error.got} (a prompt of {prompt.task})"
                raise ModelFolderError(error.what, where=where, got=got, wanted=error.wanted, cure=error.cure) from None
    limits = [limit for limit in _limits(name, policy, folder) if limit.tokens]
    if limits:
        _check_lengths(config, name, prompts, template, min(limits, key=lambda limit: limit.tokens))


def _check_plain(
    name: str, policy: PolicyTable, folder: Path, prompts: Sequence[Asked], on_note: Callable[[str], None]
) -> None:
    """Without a chat template."""
    where = f"policies.{name}.model = {policy.model!r}"
    if sign := chat_sign(folder, policy.source.partition("@")[0]):
        get = "choose a revision that has one" if named(policy) else download(policy.source, folder, FILE, CONFIG)
        raise ModelFolderError(
            "the model was trained to chat, and its folder has no chat template",
            where=where,
            got=sign,
            wanted=f"{FILE}, or chat_template in {CONFIG}",
            cure=f"{get}, or choose a base model",
        )
    for prompt in prompts:
        plain_text(prompt.content, where=f"{where}, tasks.{prompt.task}")
    on_note(f"{where}: no chat template; every prompt is asked as plain text with a line break behind it")


def _one_of_each(prompts: Sequence[Asked]) -> Iterator[Asked]:
    """One prompt of every task and order of roles: a template looks at roles, seldom at what is said."""
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
    if not policy.frozen:  # of the answer's last token nothing is predicted
        yield Limit(policy.learner.microbatch_tokens + 1, f"policies.{name}.learner.microbatch_tokens", False)


def _check_lengths(
    config: RunConfig, name: str, prompts: Sequence[Asked], template: ChatTemplate | None, limit: Limit
) -> None:
    """Raises ConfigError with how many prompts are too long, and by how much."""
    policy = config.policies[name]
    answer, room = policy.rollout.max_new_tokens, limit.tokens - policy.rollout.max_new_tokens
    texts = [_rendered(prompt, template) for prompt in prompts]
    # A token is a byte at least, so that most prompts need not be cut into tokens at all.
    doubtful = [place for place, text in enumerate(texts) if len(text.encode("utf-8", "replace")) > room]
    sizes = _token_counts(Path(policy.model), [texts[place] for place in doubtful])
    too_long = {place: size for place, size in zip(doubtful, sizes, strict=True) if size > room}
    if not too_long:
        return
    longest = max(too_long, key=lambda place: too_long[place])
    size, task = too_long[longest], prompts[longest].task
    alone = sum(size >= limit.tokens for size in too_long.values())
    what = "prompts are longer than that by themselves" if alone else "prompts leave no room for their answers"
    told = f"{alone or len(too_long)} of {len(prompts)} {what}"
    shorter = f"rollout.max_new_tokens = {limit.tokens - size}" if limit.tokens > size else "shorter prompts"
    cure = f"{shorter}, or a tasks.{task}.max_prompt_chars that leaves the longest out"
    raise ConfigError(
        f"{limit.key}: {told}",
        where=f"policies.{name}",
        got=f"{size} tokens of a prompt of {task} and max_new_tokens = {answer}",
        wanted=f"at most {limit.tokens} together" + ", all that the model can read" * limit.is_models,
        cure=cure if limit.is_models else f"{limit.key} = {size + answer}, or {cure}",
    )


def _rendered(prompt: Asked, template: ChatTemplate | None) -> str:
    return template.render(prompt.content) if template else plain_text(prompt.content, where="")


def _token_counts(folder: Path, texts: list[str]) -> list[int]:
    from tokenizers import Tokenizer

    if not texts:
        return []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [len(encoded.ids) for encoded in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
