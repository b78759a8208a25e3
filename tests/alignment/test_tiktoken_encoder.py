import json
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from mrl.alignment.encoders import PROBES, FileEncoder
from mrl.alignment.receiver import load_receiver
from mrl.alignment.tiktoken_encoder import build_tiktoken_encoder
from mrl.alignment.tokenizer_file import read_tokenizer_file

pytest.importorskip("tiktoken")

PARTS = [
    "reverse",
    " yah",
    "12",
    "  ",
    "\n",
    "caf\u00e9",
    "\u6f22",
    "\U0001f469\u200d\U0001f52c",
    "<th\u00efnk>",
    "'s",
    "e\u0301",
]
PARTS += ["<|im_end|>", "\u0661", "\u0085", "\u180e", "\U0001e900", "def f(x):", "\U0010fffe\U0010ffff", "\ud55c"]


def changed(folder, tmp_path, change):
    """The folder's tokenizer with one change to its file."""
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_nfc"])
def test_ids_are_those_of_the_file(folders, kind):
    """Over mixed texts, empty ones included, both encoders give the same ids."""
    fast, slow = (load_receiver(folders[kind], use_tiktoken=wanted) for wanted in (True, False))
    assert (fast.encodes_with, slow.encodes_with) == ("tiktoken", "tokenizers")
    random = Random(0)
    texts = ["", *("".join(random.choice(PARTS) for _ in range(random.randint(1, 8))) for _ in range(300))]
    for receiver in (fast, slow):
        assert receiver.cut_texts([], []).offsets.tolist() == [0]
    one, other = (receiver.cut_texts(texts, [text.encode() for text in texts]) for receiver in (fast, slow))
    assert np.array_equal(one.token_ids, other.token_ids)
    assert np.array_equal(one.offsets, other.offsets)
    assert one.faults == other.faults


def test_blocks_that_differ_are_left_to_the_file(folders):
    """Texts with characters on which the two disagree get the file's ids."""
    file = read_tokenizer_file(folders["byte_level"])
    reference = FileEncoder(file)

    class Odd:
        """Cuts texts with Devanagari into single bytes."""

        def encode(self, texts):
            return reference.encode([" ".join(text) if "\u0930" in text else text for text in texts])

    encoder = build_tiktoken_encoder(file, Odd(), PROBES)
    texts = ["reverse yah", "\u0930\u0940 reverse", "caf\u00e9"]
    assert np.array_equal(encoder.encode(texts).token_ids, Odd().encode(texts).token_ids)


def unsettle(content):
    """Add a piece that its own bytes do not lead to: an earlier merge takes them apart."""
    model, content["added_tokens"] = content["model"], content["added_tokens"][:1]
    for left, right in (("Q", "X"), ("X", "Z"), ("Q", "XZ")):
        model["vocab"][left + right] = max(model["vocab"].values()) + 1
        model["merges"].append([left, right])


def split_on_digits(content):
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}


def trim_added(content):
    content["added_tokens"][-1]["lstrip"] = True


def replace_text(content):
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "zzz"}, "content": "zzz"}


@pytest.mark.parametrize(
    "change", [replace_text, unsettle, split_on_digits, trim_added], ids=lambda change: change.__name__
)
def test_what_is_not_shown_to_agree_is_not_used(folders, tmp_path, change):
    """Merges that ranks cannot say, other ways of cutting, and tokens that eat spaces keep the file's encoder."""
    receiver = load_receiver(changed(folders["byte_level"], tmp_path, change))
    assert receiver.encodes_with == "tokenizers"
    assert load_receiver(folders["metaspace"]).encodes_with == "tokenizers"


def test_wrong_expression_is_noticed(folders, tmp_path):
    """A pattern that the two engines read differently fails on the probes."""
    tokenizer = Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    file = read_tokenizer_file(folders["byte_level"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert build_tiktoken_encoder(file, FileEncoder(read_tokenizer_file(tmp_path)), PROBES) is None
