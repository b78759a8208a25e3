"""Token ids of a prompt: by the model's chat template, or as a line of plain text."""

from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from mrl.config.policy_tables import PromptTable
from mrl.models.chat_template import AS_IT_IS, messages_of, plain_text, refused, use_template
from mrl.models.load_policy import load_tokenizer


class PromptEncoder:
    """Prompt -> ids under one policy's tokenizer. Ids are kept, because prompts come again every epoch."""

    def __init__(self, folder: Path, prompt: PromptTable = AS_IT_IS) -> None:
        """`prompt` says what stands around every prompt. Raises ModelFolderError without a usable tokenizer."""
        self._folder, self._prompt = folder, prompt
        self._tokenizer = load_tokenizer(folder)
        use_template(self._tokenizer, prompt)
        self._known: dict[str | Sequence[tuple[str, str]], npt.NDArray[np.int32]] = {}

    def token_ids(self, content: str | Sequence[tuple[str, str]]) -> npt.NDArray[np.int32]:
        """Return [P] int32 ids of a prompt, read-only. Raises ModelFolderError when the chat template refuses it."""
        if content not in self._known:
            try:
                ids = np.asarray(prompt_token_ids(self._tokenizer, content, self._prompt), dtype=np.int32)
            except jinja2.TemplateError as error:
                raise refused(self._folder, error, self._prompt) from error
            ids.flags.writeable = False
            self._known[content] = ids
        return self._known[content]

    def shown(self, content: str | Sequence[tuple[str, str]]) -> str:
        """Return the prompt as its ids spell it, with special tokens. Raises ModelFolderError as `token_ids`."""
        return str(self._tokenizer.decode(self.token_ids(content).tolist(), clean_up_tokenization_spaces=False))


def prompt_token_ids(
    tokenizer: PreTrainedTokenizerBase, content: str | Sequence[tuple[str, str]], prompt: PromptTable = AS_IT_IS
) -> list[int]:
    """Return the ids of a prompt by the chat template, a text as one user turn; without a template, of text and line
    break.

    The prefill, with which the answer begins, stands after the prompt and is tokenized with it. Raises ModelFolderError
    for a conversation without a template.
    """
    if not tokenizer.chat_template:
        text = plain_text(content, where=str(tokenizer.name_or_path), prefill=prompt.assistant_prefill)
        return bare_token_ids(tokenizer, text)
    rendered = tokenizer.apply_chat_template(
        messages_of(content, prompt), add_generation_prompt=True, tokenize=False, **prompt.template_options
    )
    text = str(rendered) + prompt.assistant_prefill
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def bare_token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text without a template, with the special tokens that the tokenizer puts before it (a BOS).

    Special tokens that it puts after a text (an EOS) are left out: the text goes on.
    """
    is_added = tokenizer(".", return_special_tokens_mask=True)["special_tokens_mask"]
    num_behind = [*reversed(is_added), 0].index(0)
    ids = list(tokenizer(text)["input_ids"])
    return ids[: len(ids) - num_behind]
