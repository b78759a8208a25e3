"""Alignment: a peer's text in the receiver's tokens (THL in the paper, arXiv 2605.07244).

Bytes are the common ground. They come from token ids and a table built from the tokenizer's own files alone, never from
a decode call and never from character offsets: decoding cleans up spaces, drops specials, and replaces cut characters.

    answers = describe_answers(source, token_ids, logprobs, finished)          what a peer sends     (`source`)
    batch = translate_batch(answers, receiver, max_tokens=4096)                what the receiver gets (`translate`)
    batch.row(0).token_ids, SPREADING["receiver_additive"](batch, logprobs)    what an objective reads (`spreading`)

Invariants: no token id is read by another tokenizer; what is emitted joins, byte for byte, to what was given (in NFC
for a receiver that reads NFC), or the text is rejected with a reason that the caller counts; every log-prob of a peer
is in a span or booked as dropped. The room needs numpy and `tokenizers`; `tiktoken` makes byte-level receivers faster.

reading tokenizers
- `tokenizer_file` reads `tokenizer.json`: kind, dummy prefix, fingerprint
- `rank_file`      reads raw tiktoken and tekken files as such files
- `byte_table`     token id -> bytes
- `eos`, `probes`  which ids end an answer; texts on which a tokenizer proves itself
- `encoders`, `tiktoken_encoder`   texts -> ids, flat
- `receiver`       bytes -> own token ids, own token ids -> bytes

carrying traces over
- `peer_answer`, `source`          the wire form, checked; written from sampled tokens
- `peer_rows`, `normalization`     what of it can be read: cut to UTF-8, put into NFC
- `own_rows`, `spans`, `ragged`    own tokens, common spans, flat rows
- `translate`, `aligned_batch`     the whole path and its result
- `flags`          what happened to a row, and why one was refused
- `spreading`      per-token numbers from span numbers

what it costs
- `residual`       per row and per batch; `exact_tries` the floor at no policy difference
- `pair_card`, `card_text`         what to expect of a pair before any training
"""
