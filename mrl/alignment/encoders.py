"""Texts -> own token ids, many at once: through `tokenizers`, which defines the ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mrl.alignment.ragged import offsets_of
from mrl.alignment.tokenizer_file import TokenizerFile
from mrl.errors import TokenizerRefused

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
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
"""In NFC, without the metaspace character."""

CUTTING_PROBES = (
    "I'll say it's \"DON'T\", they'Ve we'd he'S",
    "a1b22c333d4444 55555.666,777 \u0661\u0662\u0663 \u00b2\u2075 \u2167",
    "CamelCaseHTTPServer snake_case kebab-case ALLCAPS mIxEd iPhone",
    "x\n\n\ny  \n  z\t\t\tw \r\n\r\n  \u3000\u2003end   ",
    "!!! ... ?!?! //**/ #include <a.h> $$$ \u20ac100 <<<>>> ||| \u2014\u2026\u201c\u201d",
    "https://example.org/a?b=c&d=%20e#f user@example.com C:\\dir\\file.txt",
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u041c\u0418\u0420 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\x00\x01\x1f\x7f\x85\u2028\u2029\u180e\u00ad",
    "",
    " ",
    "\n",
)
"""Where regular expressions cut: contractions, digits, case, spaces, line ends, controls."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Token ids of R texts, flat."""

    token_ids: Int32s
    offsets: Int64s


def split_rows(encoded: Encoded) -> list[Int32s]:
    """The ids of every text as arrays of their own."""
    return np.split(encoded.token_ids, encoded.offsets[1:-1]) if len(encoded.offsets) > 1 else []


class Encoder(Protocol):
    """Something that cuts texts. Special tokens are neither added nor read out of the text."""

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of every text."""
        ...


class FileEncoder:
    """The tokenizer that the file describes, without dummy prefix, template, truncation or padding.

    Raises TokenizerRefused where `tokenizers` gives an added token another id than the file.
    """

    def __init__(self, file: TokenizerFile) -> None:
        self._tokenizer = Tokenizer.from_str(file.exact_json())
        self._tokenizer.encode_special_tokens = True
        _check_added_ids(self._tokenizer, file)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of every text."""
        rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        offsets = offsets_of(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
        flat = chain.from_iterable(row.ids for row in rows)
        return Encoded(np.fromiter(flat, dtype=np.int32, count=int(offsets[-1])), offsets)


def _check_added_ids(tokenizer: Tokenizer, file: TokenizerFile) -> None:
    """Raises TokenizerRefused for the first added token whose id in the file is not the one that it is given.

    A token that the vocabulary holds keeps its id there. The others are numbered on from the vocabulary's end, in the
    order of the file, whatever ids the file says.
    """
    for token in file.added_tokens:
        given = tokenizer.token_to_id(token["content"])
        if given != token["id"]:
            raise TokenizerRefused(
                f"the tokenizers library gives the added token {token['content']!r} another id than its file",
                where=str(file.path),
                got=f"id {token['id']} in the file, {'none' if given is None else f'id {given}'} from the library",
                wanted="the same id: with another one prompts hold tokens that the model does not know",
                cure="put the token into model.vocab under its id, or list added tokens with ids that follow the"
                " vocabulary without a gap",
            )
