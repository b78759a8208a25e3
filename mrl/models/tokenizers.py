"""The two kinds of tokenizer that policies made locally get, trained on generated text.

byte_level  byte-level BPE, as Qwen and GPT-2 have: words carry their leading space, any byte is in the alphabet
metaspace   BPE over characters with byte fallback, as Gemma has: a space is U+2581, unknown characters are bytes

In both, a word that stands at the end of a text or before a line break, a quote or `<` is spelled letter by letter,
while other words merge. In the prompts of word tasks exactly the subject and the answer stand there, and a policy of a
million parameters can only rearrange letters that it sees. The two kinds cut quotes and punctuation differently.
"""

import json
from collections.abc import Callable, Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPELLED = r"[A-Za-z](?=[A-Za-z]*(?:\n|$|<|\"))"
BYTE_LEVEL_PIECES = rf" ?</?answer>|{SPELLED}| ?[A-Za-z]+(?![A-Za-z]*(?:\n|$|<|\"))|\d| ?[^\sA-Za-z\d<]+|\s|<"
METASPACE = "\u2581"
METASPACE_PIECES = rf"{METASPACE}?</?answer>|\"?{METASPACE}?{SPELLED}|\d|\n"


def train_byte_level(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; its vocabulary is smaller than asked where the texts hold fewer merges."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(BYTE_LEVEL_PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, texts, vocab_size, specials, alphabet)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials[0], pad_token=specials[1], clean_up_tokenization_spaces=False
    )


def train_metaspace(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a BPE tokenizer over characters with U+2581 for the space, no dummy prefix, and all 256 byte tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", METASPACE)
    spelled = pre_tokenizers.Split(Regex(METASPACE_PIECES), "isolated")
    words = pre_tokenizers.Split(METASPACE, "merged_with_next")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([spelled, words])
    steps = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    alphabet = [METASPACE, *map(chr, range(33, 127))]
    _train(tokenizer, texts, vocab_size, specials + byte_pieces, alphabet)
    content = _without_added(tokenizer.to_str(), set(byte_pieces))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(content),
        eos_token=specials[1],
        pad_token=specials[0],
        bos_token=specials[2],
        unk_token=specials[3],
        clean_up_tokenization_spaces=False,
    )


TOKENIZERS: dict[str, Callable[[Iterable[str], int], PreTrainedTokenizerFast]] = {
    "byte_level": train_byte_level,
    "metaspace": train_metaspace,
}
"""Kind of tokenizer -> function of texts and a vocabulary size that trains it."""


def _train(
    tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, specials: list[str], alphabet: list[str]
) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)


def _without_added(content: str, pieces: set[str]) -> str:
    """Return a tokenizer's JSON with its byte pieces as plain vocabulary: as added tokens they would be read out of
    literal text and decode to nothing.
    """
    tables = json.loads(content)
    tables["added_tokens"] = [token for token in tables["added_tokens"] if token["content"] not in pieces]
    return json.dumps(tables)
