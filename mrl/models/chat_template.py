"""A model's chat template, read and tried without its tokenizer: its faults are found before a run starts."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from mrl.config.policy_tables import PromptTable
from mrl.errors import ModelFolderError

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
CHAT_TOKENS = (
    *("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start_of_role|>", "<|user|>", "[INST]"),
    *("<|assistant|>", "<\uff5cUser\uff5c>", "<|turn>"),
)
"""Tokens that open a turn in the templates of released models."""
AS_IT_IS = PromptTable()
"""Prompt table that puts nothing around a prompt."""
TURN = "XqTURNqX"
"""Stands for the policy's turn: no template writes it by itself, trims it or treats it as anything but text."""
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of templates that are not set by `template_options`."""
CHAT_NAMES = ("-instruct", "-chat", "-it")
"""Ends of the names of models that were trained to chat, before a version."""
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])([^"'\\{}]*)\1\s*\)""")
"""The call by which templates print the present day."""


class ChatTemplate:
    """The chat template that renders a policy's prompts. Rendering needs neither torch nor the tokenizer."""

    def __init__(self, folder: Path, text: str, special_tokens: dict[str, str], prompt: PromptTable) -> None:
        self._folder, self._text, self._special_tokens, self._prompt = folder, text, special_tokens, prompt

    def render(self, content: str | Sequence[tuple[str, str]]) -> str:
        """Return the prompt as the model reads it. Raises ModelFolderError when the template cannot be used for it."""
        messages = messages_of(content, self._prompt)
        return self._rendered(messages, to_be_answered=True) + self._prompt.assistant_prefill

    def behind_answer(self) -> str:
        """Return the template's text behind an answer; empty where the template cannot show one.

        Where it writes none behind the last message, a turn ends as the next role begins, as those of GLM do.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
        try:
            closing = self._rendered(chat, to_be_answered=False).partition(TURN)[2]
            if closing.strip():
                return closing
            further = self._rendered([*chat, {"role": "user", "content": TURN}], to_be_answered=False).split(TURN)
            return further[1] if len(further) == 3 else closing
        except ModelFolderError:  # a template may be good for prompts alone
            return ""

    def _rendered(self, messages: list[dict[str, str]], *, to_be_answered: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            given: dict[str, Any] = dict(self._special_tokens) | self._prompt.template_options
            text = on_day(self._text, self._prompt)
            found: Any = render_jinja_template(
                [messages], chat_template=text, add_generation_prompt=to_be_answered, **given
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise refused(self._folder, error, self._prompt) from error
        return str(found[0][0])

    @property
    def prints_day(self) -> bool:
        """Whether the template prints the present day."""
        return _CLOCK.search(self._text) is not None

    def unread_options(self) -> list[str]:
        """Return the policy's `template_options` that the template does not name. Raises ModelFolderError."""
        try:  # tokens alone: tags that only transformers knows would not parse here
            words = list(jinja2.Environment(autoescape=True).lex(self._text))
        except jinja2.TemplateError as error:
            raise refused(self._folder, error, self._prompt) from error
        read = {word for _, kind, word in words if kind == "name"} - set(GIVEN)
        return sorted(set(self._prompt.template_options) - read)


def messages_of(content: str | Sequence[tuple[str, str]], prompt: PromptTable) -> list[dict[str, str]]:
    """Return the messages of a prompt: the policy's system message and examples, then the prompt.

    A prompt that opens with a system message keeps that one, and the examples stand after it.
    """
    turns = [("user", content)] if isinstance(content, str) else list(content)
    has_own = turns[0][0] == "system"
    opening = turns[:1] if has_own else [("system", prompt.system)] * bool(prompt.system)
    shots = [turn for shot in prompt.few_shot for turn in (("user", shot.user), ("assistant", shot.assistant))]
    return [{"role": role, "content": text} for role, text in (*opening, *shots, *turns[has_own:])]


def on_day(template: str, prompt: PromptTable) -> str:
    """Return a template that prints `prompt.today`, the day of the run, in place of the present day; without it, as it
    is.
    """
    day = prompt.today  # a function given in place of `strftime_now` would reach the template as text
    return _CLOCK.sub(lambda call: f'"{day:{call[2]}}"', template) if day else template


def use_template(tokenizer: Any, prompt: PromptTable) -> None:
    """Set the chat template of a transformers tokenizer: the policy's own where it has one, with the day of the run."""
    template = prompt.chat_template or tokenizer.chat_template
    if isinstance(template, dict):  # several, each with a name
        tokenizer.chat_template = {name: on_day(one, prompt) for name, one in template.items()}
    elif template:
        tokenizer.chat_template = on_day(template, prompt)


def read_template(folder: Path, prompt: PromptTable = AS_IT_IS) -> ChatTemplate | None:
    """Return the chat template of the policy, else of its folder; None where neither has one.

    Raises ModelFolderError for a file that cannot be read.
    """
    settings = _settings(folder)
    if prompt.chat_template:
        return ChatTemplate(folder, prompt.chat_template, _special_tokens(settings), prompt)
    text: Any = settings.get("chat_template")
    if (folder / FILE).is_file():
        try:
            text = (folder / FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFolderError(
                "the chat template cannot be read", where=str(folder / FILE), got=str(error)
            ) from None
    if isinstance(text, list):  # several, each with a name
        named = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
        text = named.get("default")
    if not isinstance(text, str) or not text:
        return None
    return ChatTemplate(folder, text, _special_tokens(settings), prompt)


def chat_sign(folder: Path, source: str = "") -> str:
    """Return, in words, the evidence that the model was trained to chat; empty for a model of plain text.

    Tokens that open a turn are not enough, for base models of a family have the same tokenizer. Beside them the EOS
    token has to be one that ends a turn; else the model's name has to say that it chats.
    """
    settings = _settings(folder)
    added = settings.get("added_tokens_decoder") or {}
    known = {str(token.get("content")) for token in added.values() if isinstance(token, dict)}
    opening = sorted(known & set(CHAT_TOKENS))
    ends = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>")
    end = _special_tokens(settings).get("eos_token", "")
    if opening and end in ends:
        return f"{opening[0]} opens a turn and {end} ends an answer"
    name = f"{source} {folder.name}".lower()
    if any(f"{word}{after}" in f"{name} " for word in CHAT_NAMES for after in (" ", "-")):
        return f"the model is called {source or folder.name}"
    return ""


def bos_of(folder: Path) -> str:
    """Return the text of the token that opens every text of the model (BOS); empty where its settings name none."""
    return _special_tokens(_settings(folder)).get("bos_token", "")


def plain_text(content: str | Sequence[tuple[str, str]], *, where: str, prefill: str = "") -> str:
    """Return the prompt of a model without a chat template: text, line break, prefill. Raises ModelFolderError for a
    conversation.
    """
    if isinstance(content, str):
        return content + "\n" + prefill
    raise ModelFolderError(
        "a prompt is a conversation, but the model has no chat template",
        where=where,
        got=f"{len(content)} messages",
        wanted=f"{FILE}, or chat_template in {CONFIG}",
        cure="add the model's template there, or use prompts of one user message",
    )


def refused(folder: Path, error: Exception, prompt: PromptTable = AS_IT_IS) -> ModelFolderError:
    """Return the error of a template as one line that names the template's file, or its configuration key."""
    file = str(folder / (FILE if (folder / FILE).is_file() else CONFIG))
    file = "prompt.chat_template" if prompt.chat_template else file
    has_lines = isinstance(error, jinja2.TemplateSyntaxError) and not file.endswith(CONFIG)
    line = f":{error.lineno}" if has_lines and isinstance(error, jinja2.TemplateSyntaxError) else ""
    kind = "is not valid" if isinstance(error, jinja2.TemplateSyntaxError) else "cannot render a prompt"
    return ModelFolderError(
        f"the chat template {kind}",
        where=f"{file}{line}",
        got=" ".join(str(error).split()) or type(error).__name__,
        wanted="a template that renders a conversation that ends with a user's message",
        cure="fix the template" if prompt.chat_template else "download the file again, or fix it",
    )


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        where, got = str(folder / CONFIG), " ".join(str(error).split())
        raise ModelFolderError("the file cannot be read", where=where, got=got, wanted="a JSON object") from None
    return settings if isinstance(settings, dict) else {}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return name -> text of the special tokens, by the names that templates use (`bos_token`)."""
    found = {}
    for name, token in settings.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
