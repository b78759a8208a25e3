"""The text of a prompt becomes token ids: by the model's chat template, or as a line of plain text."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from mrl.models.load_policy import load_tokenizer


class PromptEncoder:
    """Prompt text -> ids under one policy's tokenizer. Ids are kept, because prompts come again every epoch."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelFolderError when the folder has no usable tokenizer."""
        self._tokenizer = load_tokenizer(folder)
        self._known: dict[str, npt.NDArray[np.int32]] = {}

    def token_ids(self, text: str) -> npt.NDArray[np.int32]:
        """[P] int32, read-only."""
        if text not in self._known:
            ids = np.asarray(prompt_token_ids(self._tokenizer, text), dtype=np.int32)
            ids.flags.writeable = False
            self._known[text] = ids
        return self._known[text]


def prompt_token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The prompt as one user turn of the chat template; without a template, the text and a line break.

    Special tokens that the tokenizer itself adds (a BOS) are kept.
    """
    if not tokenizer.chat_template:
        return list(tokenizer(text + "\n")["input_ids"])
    turns = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
