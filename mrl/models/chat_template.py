"""A model's chat template, read and tried without its tokenizer: what is wrong with it is found before a run starts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from mrl.errors import ModelFolderError

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
CHAT_TOKENS = (
    *("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start_of_role|>", "<|user|>", "[INST]"),
    *("<|assistant|>", "<\uff5cUser\uff5c>", "<|turn>"),
)
"""Tokens that open a turn in the templates of released models."""
CHAT_NAMES = ("-instruct", "-chat", "-it")
"""Ends of the names of models that were trained to chat, before a version."""


class ChatTemplate:
    """The template of a model folder. Rendering needs neither torch nor the tokenizer."""

    def __init__(self, folder: Path, text: str, special_tokens: dict[str, str]) -> None:
        self._folder, self._text, self._special_tokens = folder, text, special_tokens

    def render(self, content: str | Sequence[tuple[str, str]]) -> str:
        """The prompt as the model is asked it. Raises ModelFolderError when the template cannot be used for it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = [("user", content)] if isinstance(content, str) else content
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            given: dict[str, Any] = dict(self._special_tokens)
            found: Any = render_jinja_template(
                [messages], chat_template=self._text, add_generation_prompt=True, **given
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise refused(self._folder, error) from error
        return str(found[0][0])


def read_template(folder: Path) -> ChatTemplate | None:
    """The folder's chat template; None where it has none. Raises ModelFolderError for a file that cannot be read."""
    settings = _settings(folder)
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
    return ChatTemplate(folder, text, _special_tokens(settings))


def chat_sign(folder: Path, source: str = "") -> str:
    """What says that the model was trained to chat, in words; empty for a model of plain text.

    Its tokenizer having tokens that open a turn is not enough, for base models of a family share it: the end of a turn
    has to be the end of an answer, or the name has to say so.
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
        return f"its name is {source or folder.name}"
    return ""


def plain_text(content: str | Sequence[tuple[str, str]], *, where: str) -> str:
    """What a model without a chat template is asked. Raises ModelFolderError for a conversation."""
    if isinstance(content, str):
        return content + "\n"
    raise ModelFolderError(
        "a prompt is a conversation, and the model has no chat template",
        where=where,
        got=f"{len(content)} messages",
        wanted=f"{FILE}, or chat_template in {CONFIG}",
        cure="put the template of the model there, or give prompts of one user message",
    )


def refused(folder: Path, error: Exception) -> ModelFolderError:
    """The error of a template as one line that names its file."""
    file = folder / (FILE if (folder / FILE).is_file() else CONFIG)
    line = f":{error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) and file.name == FILE else ""
    kind = "is not valid" if isinstance(error, jinja2.TemplateSyntaxError) else "refuses a prompt"
    return ModelFolderError(
        f"the chat template {kind}",
        where=f"{file}{line}",
        got=" ".join(str(error).split()) or type(error).__name__,
        wanted="a template that renders a conversation that ends with a user's message",
        cure="fetch the file anew, or mend it",
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
    """Name -> text, as templates use them (`bos_token`)."""
    found = {}
    for name, token in settings.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
