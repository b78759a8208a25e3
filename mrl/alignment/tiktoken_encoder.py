"""The same ids through tiktoken, for byte-level tokenizers, where it is installed and shown to agree.

tiktoken looks a whole pre-token up first and then joins the pair whose bytes have the lowest rank; the file's own
encoder follows a list of merges. The two agree on every pre-token when each piece of the vocabulary, encoded alone by
merges, is that one piece: a pair of neighbours that spells a piece then always has a merge of its own. That is checked
for the whole vocabulary. The regular expressions run in different engines with tables of different Unicode editions;
they are compared on the probe texts and on characters of every block, and texts with characters of a block that
differs are left to the file's encoder.
"""

import importlib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models

from mrl.alignment.byte_table import byte_piece, piece_bytes
from mrl.alignment.encoders import Encoded, Encoder, Int32s, split_rows
from mrl.alignment.ragged import offsets_of
from mrl.alignment.tokenizer_file import TokenizerFile, steps

tiktoken: Any
try:
    tiktoken = importlib.import_module("tiktoken")
except ImportError:
    tiktoken = None

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NEVER = "\U0010fffe\U0010ffff"
"""A special token that no text holds. Without any, tiktoken searches every text for the empty string, at length."""
BLOCK = 64
CHARACTERS_PER_BLOCK = 4


class TiktokenEncoder:
    """tiktoken where it is known to agree, the file's own encoder elsewhere."""

    def __init__(
        self, encoding: Any, ids: Int32s, added: frozenset[str], reference: Encoder, *, reads_nfc: bool
    ) -> None:
        self._encoding, self._ids, self._added, self._reference = encoding, ids, added, reference
        self._reads_nfc = reads_nfc
        self._rank_of_id = np.zeros(int(ids.max()) + 1, dtype=np.uint32)
        self._rank_of_id[ids] = np.arange(len(ids), dtype=np.uint32)
        self._disputed: re.Pattern[str] | None = None

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of every text."""
        rows = self._rank_rows(texts)
        if self._disputed:
            search = self._disputed.search
            slow = [n for n, text in enumerate(texts) if not text.isascii() and search(text)]
            exact = self._reference.encode([texts[n] for n in slow])
            for n, ids in zip(slow, split_rows(exact), strict=True):
                rows[n] = self._rank_of_id[ids]
        offsets = offsets_of(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
        return Encoded(self._ids[np.concatenate(rows)] if rows else np.zeros(0, dtype=np.int32), offsets)

    def agrees(self, texts: Sequence[str]) -> list[bool]:
        """For every text whether tiktoken alone gives the reference's ids."""
        pairs = zip(self._rank_rows(texts), split_rows(self._reference.encode(texts)), strict=True)
        return [np.array_equal(self._ids[fast], slow) for fast, slow in pairs]

    def _rank_rows(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        encode, added = self._encoding.encode_to_numpy, self._added
        if self._reads_nfc:
            texts = [text if text.isascii() else unicodedata.normalize("NFC", text) for text in texts]
        return [encode(text, allowed_special=added, disallowed_special=()) for text in texts]

    def leave_out_disputed_blocks(self) -> None:
        """Compare characters of every block of Unicode and leave texts with blocks that differ to the reference."""
        blocks = list(_blocks())
        agreed = self.agrees([text for _, text in blocks])
        apart = [start for (start, _), same in zip(blocks, agreed, strict=True) if not same]
        classes = "".join(f"\\U{start:08x}-\\U{start + BLOCK - 1:08x}" for start in apart)
        self._disputed = re.compile(f"[{classes}]") if apart else None


def build_tiktoken_encoder(file: TokenizerFile, reference: Encoder, probes: Sequence[str]) -> TiktokenEncoder | None:
    """A tiktoken encoder with the ids of `reference`, or None where tiktoken is missing or agreement is not shown."""
    pattern = _pattern(file.content.get("pre_tokenizer"))
    if tiktoken is None or pattern is None or not _is_plain(file):
        return None
    ranks = _ranks(file)
    if ranks is None:
        return None
    added = {str(token["content"]): int(token["id"]) for token in file.added_tokens if not token.get("special")}
    if any(one != other and one in other for one in added for other in added):
        return None
    specials = {content: len(ranks) + place for place, content in enumerate(added)}
    specials[NEVER] = len(ranks) + len(added)
    vocab = file.content["model"]["vocab"]
    ids = np.array([*(vocab[byte_piece(data)] for data in ranks), *added.values()], dtype=np.int32)
    try:
        encoding = tiktoken.Encoding(file.path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    except ValueError:
        return None
    encoder = TiktokenEncoder(encoding, ids, frozenset(added), reference, reads_nfc=file.reads_nfc)
    encoder.leave_out_disputed_blocks()
    texts = [*probes, *(f"{probe}{content}{probe}" for content in added for probe in probes[:2])]
    return encoder if all(encoder.agrees(texts)) else None


def _is_plain(file: TokenizerFile) -> bool:
    """Whether text reaches the pre-tokenizer unchanged (NFC aside) and added tokens match literally."""
    normalizers = {step.get("type") for step in steps(file.content.get("normalizer"))}
    awkward = ("lstrip", "rstrip", "single_word")
    is_literal = not any(token.get(key) for token in file.added_tokens for key in awkward)
    return file.kind == "byte_level" and normalizers <= {"NFC"} and is_literal


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """The one regular expression that makes pre-tokens, or None."""
    match list(steps(pre_tokenizer)):
        case [{"type": "ByteLevel", "use_regex": True}]:
            return GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}
            | {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True},
            {"type": "ByteLevel", "use_regex": False},
        ]:
            return pattern
    return None


def _ranks(file: TokenizerFile) -> dict[bytes, int] | None:
    """Bytes -> rank in the order of the merges, or None when ranks cannot say what the merges say."""
    vocab = file.content["model"]["vocab"]
    if file.kind != "byte_level" or any(byte_piece(bytes([byte])) not in vocab for byte in range(256)):
        return None
    ranks = {bytes([byte]): byte for byte in range(256)}
    for piece in dict.fromkeys(left + right for left, right in file.merges):
        data = piece_bytes(piece, "byte_level")
        if data is None or piece not in vocab:
            return None
        ranks.setdefault(data, len(ranks))
    return ranks if _ranks_say_what_merges_say(file, list(map(byte_piece, ranks))) else None


def _ranks_say_what_merges_say(file: TokenizerFile, pieces: list[str]) -> bool:
    """Whether every pair of neighbours that spells a piece has a merge, and whole pieces are found the same way."""
    model, merges = file.content["model"], set(file.merges)
    vocab = model["vocab"]
    bare = Tokenizer(models.BPE(vocab=vocab, merges=file.merges))
    rows = bare.encode_batch_fast(pieces, add_special_tokens=False)
    split = [piece for piece, row in zip(pieces, rows, strict=True) if len(row) != 1]
    if not model.get("ignore_merges"):
        return not split
    known = {*pieces, *(token["content"] for token in file.added_tokens)}
    pairs = ((piece[:at], piece[at:]) for piece in split for at in range(1, len(piece)))
    return vocab.keys() <= known and all(pair in merges for pair in pairs if pair[0] in vocab and pair[1] in vocab)


def _blocks() -> Iterator[tuple[int, str]]:
    """Every block that has assigned characters, and a text that puts some of them in telling places."""
    for start in range(0x80, 0x110000, BLOCK):
        if 0xD800 <= start < 0xE000 or 0xE000 <= start < 0xF900 or start >= 0xF0000:
            continue
        codes = range(start, start + BLOCK, BLOCK // CHARACTERS_PER_BLOCK)
        known = [chr(code) for code in codes if unicodedata.category(chr(code)) != "Cn"]
        text = "".join(f"a{c}b {c} {c}{c}1{c}2 {c}\n!{c}." for c in known)
        if text:
            yield start, unicodedata.normalize("NFC", text)
