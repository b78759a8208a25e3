"""Texts -> own token ids, many at once: through `tokenizers`, which defines the ids.

Encoding takes nineteen twentieths of the time that the alignment of an answer takes, so long batches are cut by several
threads. The library's own threads are off in a run, where every process would have as many as the host has cores.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from mrl.alignment.ragged import offsets_of
from mrl.alignment.tokenizer_file import TokenizerFile
from mrl.errors import TokenizerRefused

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
MAX_THREADS = 8
PIECE_CHARS = 64 * 1024
"""Characters that a thread takes at a time, in whole rows: some 50 ms of work."""
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
"""Texts that every supported tokenizer has to reproduce: in NFC, without the metaspace character."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Token ids of R texts, flat."""

    token_ids: Int32s
    offsets: Int64s


class FileEncoder:
    """Encoder by the tokenizer that a file describes, without dummy prefix, template, truncation or padding.

    Raises TokenizerRefused where `tokenizers` gives an added token another id than the file.
    """

    def __init__(self, file: TokenizerFile) -> None:
        self._tokenizer = Tokenizer.from_str(file.exact_json())
        self._tokenizer.encode_special_tokens = True
        _check_added_ids(self._tokenizer, file)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode every text, in several threads where the batch is long."""
        pieces = list(_pieces(texts))
        num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces))
        if num_threads < 2:
            rows = self._rows(texts)
        else:
            with ThreadPoolExecutor(num_threads, "encoding") as threads:
                rows = list(chain.from_iterable(threads.map(self._rows, pieces)))
        offsets = offsets_of(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
        flat = chain.from_iterable(row.ids for row in rows)
        return Encoded(np.fromiter(flat, dtype=np.int32, count=int(offsets[-1])), offsets)

    def _rows(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode texts in this thread; the library releases the interpreter lock meanwhile."""
        return self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)


def _pieces(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield pieces of consecutive texts, each as many as reach `PIECE_CHARS` together."""
    first = num_chars = 0
    for end, text in enumerate(texts, start=1):
        num_chars += len(text)
        if num_chars >= PIECE_CHARS or end == len(texts):
            yield texts[first:end]
            first, num_chars = end, 0


def _check_added_ids(tokenizer: Tokenizer, file: TokenizerFile) -> None:
    """Raises TokenizerRefused for the first added token to which the library gives another id than the file does.

    A token that the vocabulary holds keeps its id there. The others are numbered on from the vocabulary's end, in the
    order of the file, whatever ids the file says.
    """
    for token in file.added_tokens:
        given = tokenizer.token_to_id(token["content"])
        if given != token["id"]:
            raise TokenizerRefused(
                f"the tokenizers library gives the added token {token['content']!r} an id that differs from its file",
                where=str(file.path),
                got=f"id {token['id']} in the file, {'none' if given is None else f'id {given}'} from the library",
                wanted="the same id; otherwise prompts contain tokens that the model does not know",
                cure="put the token into model.vocab under its id, or list added tokens with ids that follow the"
                " vocabulary without a gap",
            )
