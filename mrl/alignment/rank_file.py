"""Receivers from raw rank files: tiktoken's `base64 rank` lines and Mistral's `tekken.json`.

For a model folder that holds such a file `receiver.load_receiver` does the same. Here the caller says what the file
leaves open.
"""

from collections.abc import Mapping
from pathlib import Path

from mrl.alignment.rank_table import PATTERNS, read_tekken, read_tiktoken_ranks
from mrl.alignment.receiver import Receiver, prove


def load_tiktoken_ranks(
    path: Path,
    *,
    pattern: str,
    special_tokens: Mapping[str, int],
    eos: str | None = None,
    nfc: bool = False,
    use_tiktoken: bool = True,
) -> Receiver:
    """A receiver from a tiktoken rank file; `pattern` is a regular expression or a name in `PATTERNS`.

    `nfc` says that the family puts text into NFC first (Qwen). Raises ModelFolderError for a malformed file, an `eos`
    that is not among the special tokens, or ranks that do not reproduce the probe texts.
    """
    splits, ends = PATTERNS.get(pattern, pattern), () if eos is None else (eos,)
    file = read_tiktoken_ranks(path, pattern=splits, special_tokens=special_tokens, eos_tokens=ends, nfc=nfc)
    return prove(Receiver(file, eos_ids=file.eos_ids, use_tiktoken=use_tiktoken), file)


def load_tekken(path: Path, *, eos: str = "</s>", use_tiktoken: bool = True) -> Receiver:
    """A receiver from a `tekken.json`; special tokens take the first ids, ranks follow.

    Raises ModelFolderError for a malformed file or one that does not reproduce the probe texts.
    """
    file = read_tekken(path, eos=eos)
    return prove(Receiver(file, eos_ids=file.eos_ids, use_tiktoken=use_tiktoken), file)
