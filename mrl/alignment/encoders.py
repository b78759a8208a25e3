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

    Raises TokenizerRefused where `tokenizers` gives an added token another id than the file: it numbers anew what does
    not follow the vocabulary.
    """

    def __init__(self, file: TokenizerFile) -> None:
        self._tokenizer = Tokenizer.from_str(file.exact_json())
        self._tokenizer.encode_special_tokens = True
        for token in file.added_tokens:
            found = self._tokenizer.token_to_id(token["content"])
            if found != token["id"] and not token.get("special"):
                got = f"{found} for {token['content']}, listed as {token['id']}"
                raise TokenizerRefused(
                    "an added token is given another id, so its id would stand for another token than the model learnt",
                    where=str(file.path),
                    got=got,
                )

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of every text."""
        rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        offsets = offsets_of(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
        flat = chain.from_iterable(row.ids for row in rows)
        return Encoded(np.fromiter(flat, dtype=np.int32, count=int(offsets[-1])), offsets)
