"""The receiving end: a peer's bytes become own token ids, or are rejected with a reason.

A completion is read as a text of its own. Tokenizers with a dummy prefix write such a text with one phantom space in
front, which has no bytes; the receiver adds it when it encodes and takes it off when it reads own ids.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mrl.alignment.byte_table import ByteTable, build_byte_table
from mrl.alignment.tokenizer_file import TokenizerFile, read_tokenizer_file
from mrl.errors import ModelFolderError

Reason = Literal["empty", "utf8", "special_out", "bytes_differ", "too_long"]

PROBES = (
    "The quick brown fox",
    " leading and  double   spaces ",
    "12345 + 678 = 13023.0",
    "line one\nline two\r\n\tindented\n\n",
    "def f(x):\n    return {'a': [x**2, -1]}",
    "na\u00efve caf\u00e9 \u00df \u0130 \u00bd \ufb01",
    "\u6f22\u5b57 \u304b\u306a \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f469\u200d\U0001f52c \U0001d4b3 \u00a0\u200b\ufeff",
    "\u0120 <0x0A> <|im_end|> </s> <unk>",
)
"""Texts in NFC without the metaspace character, on which a tokenizer proves that its byte table is right."""


@dataclass(frozen=True, slots=True)
class Retokenized:
    """A text in own tokens: [T] int32, the own EOS included when the text was finished."""

    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A text that cannot be expressed exactly, and why; an expected outcome, to be counted."""

    reason: Reason


class Receiver:
    """One policy's tokenizer as a reader and writer of bytes.

    `eos_id` ends an own answer; `eos_ids` are all ids that end one.
    """

    def __init__(self, file: TokenizerFile, *, eos_ids: tuple[int, ...]) -> None:
        self.fingerprint = file.fingerprint
        self.eos_id = eos_ids[0]
        self.eos_ids = eos_ids
        self.table: ByteTable = build_byte_table(file)
        self._prefix = " " if file.has_dummy_prefix else ""
        self._encoder = Tokenizer.from_str(file.exact_json())
        self._encoder.encode_special_tokens = True
        self._silent_ids = self.table.special_ids | set(eos_ids)

    def retokenize(self, completion: bytes, *, finished: bool, max_tokens: int) -> Retokenized | Rejected:
        """Own token ids of a peer's completion.

        Literals of special tokens in the text stay text. Rejected with "empty"; "utf8" for bytes that are no valid
        UTF-8, as an answer cut inside a character; "special_out" when a special id would come out nevertheless;
        "bytes_differ" when the ids do not stand for exactly these bytes (a normalizer changed the text, or it holds a
        literal metaspace character); "too_long" when there are more than `max_tokens` ids, the own EOS of a `finished`
        text included.
        """
        if not completion:
            return Rejected("empty")
        try:
            text = completion.decode("utf-8")
        except UnicodeDecodeError:
            return Rejected("utf8")
        token_ids = self._encode(text)
        if not self._silent_ids.isdisjoint(token_ids):
            return Rejected("special_out")
        if self.completion_bytes(token_ids) != completion:
            return Rejected("bytes_differ")
        if finished:
            token_ids = [*token_ids, self.eos_id]
        if len(token_ids) > max_tokens:
            return Rejected("too_long")
        return Retokenized(np.asarray(token_ids, dtype=np.int32))

    def completion_bytes(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
        """The bytes of own ids; specials and EOS are zero-width, and a phantom space is taken off.

        May end inside a character when the answer was cut. Raises ValueError for a negative id.
        """
        return self.table.join(token_ids).removeprefix(self._prefix.encode())

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode(self._prefix + text, add_special_tokens=False).ids


def load_receiver(folder: Path) -> Receiver:
    """The receiver of a Hugging Face model folder: `tokenizer.json`, and the EOS of its configuration files.

    Raises ModelFolderError for missing files, a kind of tokenizer that is not supported, one whose byte table does not
    reproduce the probe texts, or a folder without an EOS.
    """
    file = read_tokenizer_file(folder)
    receiver = Receiver(file, eos_ids=_find_eos(folder, file))
    for probe in PROBES:
        result = receiver.retokenize(probe.encode(), finished=False, max_tokens=4096)
        if isinstance(result, Rejected):
            raise ModelFolderError(
                "the tokenizer does not reproduce a probe text byte for byte",
                where=str(file.path),
                got=f"{result.reason} on {probe!r}",
                wanted="byte-level BPE (NFC at most), or metaspace BPE with all 256 byte tokens",
            )
    return receiver


def _find_eos(folder: Path, file: TokenizerFile) -> tuple[int, ...]:
    """EOS ids, the preferred one first: that of the tokenizer's configuration where it is among several."""
    named = _named_eos(_optional_json(folder / "tokenizer_config.json"), file)
    for name in ("generation_config.json", "config.json"):
        found = _optional_json(folder / name).get("eos_token_id")
        ids = [found] if isinstance(found, int) else [i for i in found or [] if isinstance(i, int)]
        if ids:
            return tuple(sorted(ids, key=lambda token_id: token_id != named))
    if named is None:
        wanted = "eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json"
        raise ModelFolderError("no EOS token is declared", where=str(folder), wanted=wanted)
    return (named,)


def _named_eos(config: Mapping[str, Any], file: TokenizerFile) -> int | None:
    eos = config.get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    added = {token["content"]: int(token["id"]) for token in file.added_tokens}
    vocab: Mapping[str, int] = file.content["model"]["vocab"]
    return added.get(content, vocab.get(content)) if isinstance(content, str) else None


def _optional_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError("cannot read a configuration file", where=str(path), got=str(error)) from error
    return content if isinstance(content, dict) else {}
