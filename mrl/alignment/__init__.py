"""Alignment: a peer's text in the receiver's tokens (THL in the paper, arXiv 2605.07244).

Bytes are the common ground. They come from token ids and a table built from `tokenizer.json` alone, never from a decode
call and never from character offsets: decoding cleans up spaces, drops specials, and replaces cut characters.

Invariants: no token id is read by another tokenizer; what is emitted joins, byte for byte, to what was given, or the
text is rejected with a reason that the caller counts.

- `tokenizer_file` reads `tokenizer.json`: kind, dummy prefix, fingerprint
- `byte_table`     token id -> bytes
- `receiver`       bytes -> own token ids, own token ids -> bytes
"""
