"""Alignment: a peer's text in the receiver's tokens (THL in the paper, arXiv 2605.07244).

Bytes are the common ground. They come from token ids and a table built from the tokenizer's own files alone, never from
a decode call and never from character offsets: decoding cleans up spaces, drops specials, and replaces cut characters.

Invariants: no token id is read by another tokenizer; the emitted tokens join, byte for byte, to the given text (in NFC
for a receiver that reads NFC), or the text is rejected with a reason that the caller counts; every log-prob of a peer
is in a span or booked as dropped. The package needs numpy and `tokenizers`.

The names in `__all__` are for use outside mrl; inside, modules are imported by their own names. A tokenizer's folder
holds a tokenizer.json and says which token ends an answer.

>>> from pathlib import Path
>>> import numpy as np
>>> from mrl.alignment import SPREADING, FinishReason, describe_answers, load_receiver, summarise
>>> from mrl.alignment import translate_batch, translate_texts
>>> peer, receiver = load_receiver(Path("models/peer")), load_receiver(Path("models/receiver"))
>>> sampled = translate_texts([b"12 + 34 = 46"], [True], peer, max_tokens=64).row(0).token_ids   # as if sampled
>>> logprobs = np.full(len(sampled), -0.25, dtype=np.float32)
>>> answers = describe_answers(peer, [sampled], [logprobs], [FinishReason.STOP])   # text and log-probs: goes anywhere
>>> batch = translate_batch(answers, receiver, max_tokens=4096)
>>> receiver.completion_bytes(batch.row(0).token_ids), batch.reject_reason
(b'12 + 34 = 46', ('',))
>>> bool(np.isclose(SPREADING["bytes"](batch).sum(), logprobs.sum()))  # log-probs for the receiver's tokens
True
>>> report = summarise(batch)
>>> report.bytes, report.rejected, report.dropped_tokens
(12, {}, 0)

reading tokenizers
- `tokenizer_file` reads `tokenizer.json`: kind, dummy prefix, fingerprint; `tokenizer_refusals`: why a kind is refused
- `tokenizer_folder`               the tokenizer of a model folder, and which ids end an answer
- `byte_table`     token id -> bytes
- `encoders`       texts -> ids, flat, proved on probes
- `receiver`       bytes -> own token ids, own token ids -> bytes

carrying traces over
- `peer_answer`, `sampled_answers`  the wire form, checked; written from sampled tokens
- `peer_rows`, `normalization`     the readable part of an answer: cut to UTF-8, put into NFC
- `own_rows`, `shared_spans`, `ragged`  own tokens, shared spans, flat rows
- `translate`, `aligned_batch`     the whole path and its result; `selection`: some of its rows, or several as one
- `flags`          what happened to a row, and why one was refused
- `spreading`      per-token log-probs from those of spans

what it costs
- `residual`       the residual of a batch; `exact_tries`: the floor at no policy difference
- `pair_card`, `card_text`         what to expect of a pair before any training
"""

from mrl.alignment.aligned_batch import AlignedBatch, AlignedTrace
from mrl.alignment.flags import Flag, Rejected
from mrl.alignment.pair_card import PairCard, make_card
from mrl.alignment.peer_answer import PeerAnswer, validate
from mrl.alignment.receiver import Receiver, load_receiver
from mrl.alignment.residual import Residual, summarise
from mrl.alignment.sampled_answers import describe_answers
from mrl.alignment.spreading import SPREADING
from mrl.alignment.translate import translate_batch, translate_texts
from mrl.records.finish import FinishReason

__all__ = [
    "SPREADING",
    "AlignedBatch",
    "AlignedTrace",
    "FinishReason",
    "Flag",
    "PairCard",
    "PeerAnswer",
    "Receiver",
    "Rejected",
    "Residual",
    "describe_answers",
    "load_receiver",
    "make_card",
    "summarise",
    "translate_batch",
    "translate_texts",
    "validate",
]
