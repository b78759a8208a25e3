"""Texts -> own token ids, many at once: through `tokenizers`, which defines the ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mrl.alignment.ragged import offsets_of
from mrl.alignment.tokenizer_file import TOKENIZER_FILE, TokenizerFile
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
    order of the file, whatever ids the file says. The special tokens of a rank file are read by other programs.
    """
    is_common_form = file.path.name == TOKENIZER_FILE
    for token in file.added_tokens:
        given = tokenizer.token_to_id(token["content"])
        if given != token["id"] and (is_common_form or not token.get("special")):
            raise TokenizerRefused(
                f"the tokenizers library gives the added token {token['content']!r} another id than its file",
                where=str(file.path),
                got=f"id {token['id']} in the file, {'none' if given is None else f'id {given}'} from the library",
                wanted="the same id: with another one prompts hold tokens that the model does not know",
                cure="put the token into model.vocab under its id, or list added tokens with ids that follow the"
                " vocabulary without a gap",
            )
