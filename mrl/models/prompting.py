"""The content of a prompt becomes token ids: by the model's chat template, or as a line of plain text."""

from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from mrl.models.chat_template import plain_text, refused
from mrl.models.load_policy import load_tokenizer


class PromptEncoder:
    """Prompt -> ids under one policy's tokenizer. Ids are kept, because prompts come again every epoch."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelFolderError when the folder has no usable tokenizer."""
        self._folder = folder
        self._tokenizer = load_tokenizer(folder)
        self._known: dict[str | Sequence[tuple[str, str]], npt.NDArray[np.int32]] = {}

    def token_ids(self, content: str | Sequence[tuple[str, str]]) -> npt.NDArray[np.int32]:
        """[P] int32, read-only. Raises ModelFolderError when the chat template refuses it."""
        if content not in self._known:
            try:
                ids = np.asarray(prompt_token_ids(self._tokenizer, content), dtype=np.int32)
            except jinja2.TemplateError as error:
                raise refused(self._folder, error) from error
            ids.flags.writeable = False
            self._known[content] = ids
        return self._known[content]


def prompt_token_ids(tokenizer: PreTrainedTokenizerBase, content: str | Sequence[tuple[str, str]]) -> list[int]:
    """The prompt by the chat template, text as one user turn; without a template, text and a line break.

    Special tokens that the tokenizer itself adds (a BOS) are kept. Raises ModelFolderError for a conversation without a
    template.
    """
    if not tokenizer.chat_template:
        return list(tokenizer(plain_text(content, where=str(tokenizer.name_or_path)))["input_ids"])
    turns = [("user", content)] if isinstance(content, str) else content
    messages = [{"role": role, "content": text} for role, text in turns]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
