"""The sending end: describes own sampled tokens as answers that any tokenizer can read.

Shapes: R answers, T tokens of one answer, its closing EOS included.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.ragged import offsets_of
from mrl.alignment.receiver import Receiver
from mrl.records.finish import FinishReason

Int32s: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]


def describe_answers(
    source: Receiver, token_ids: Sequence[Int32s], logprobs: Sequence[Float32s], finish_reasons: Sequence[FinishReason]
) -> list[PeerAnswer]:
    """Return the answers that the policy of `source` sampled, in bytes. An answer that stopped ends with an EOS of its
    own.

    `noncanonical` is told for finished answers only: the end of a cut answer is cut otherwise by every tokenizer.
    Raises ValueError for a negative id or an unknown finish reason.
    """
    offsets = offsets_of(np.array([len(ids) for ids in token_ids], dtype=np.int64))
    flat = np.concatenate([np.zeros(0, np.int32), *token_ids])
    lengths, special = source.byte_lengths(flat, offsets), source.table.is_special(flat)
    completions = [source.completion_bytes(ids) for ids in token_ids]
    odd = _noncanonical(source, token_ids, completions, finish_reasons)
    bounds = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    return [
        PeerAnswer(
            completion=completion,
            byte_lengths=lengths[start:end],
            logprobs=np.asarray(logprobs[row], dtype=np.float32),
            special=special[start:end],
            finish_reason=FinishReason(finish_reasons[row]),
            fingerprint=source.fingerprint,
            token_ids=np.asarray(token_ids[row], dtype=np.int32),
            noncanonical=row in odd,
        )
        for row, (completion, (start, end)) in enumerate(zip(completions, bounds, strict=True))
    ]


def _noncanonical(
    source: Receiver,
    token_ids: Sequence[Int32s],
    completions: Sequence[bytes],
    finish_reasons: Sequence[FinishReason],
) -> set[int]:
    """Return finished rows whose text their own tokenizer would cut otherwise, or could not read."""
    rows = [row for row, reason in enumerate(finish_reasons) if reason == FinishReason.STOP]
    texts = {row: completions[row].decode(errors="replace") for row in rows}
    cut = source.cut_texts([texts[row] for row in rows], [completions[row] for row in rows])
    odd = {rows[place] for place in cut.faults}
    for place, row in enumerate(rows):
        sampled = token_ids[row]
        has_eos = len(sampled) > 0 and bool(source.table.is_special(sampled[-1:])[0])
        body = sampled[:-1] if has_eos else sampled
        if not np.array_equal(body, cut.token_ids[cut.offsets[place] : cut.offsets[place + 1]]):
            odd.add(row)
    return odd
