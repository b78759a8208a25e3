"""Tokenizers as they are read: kinds and fingerprints, ends, and the faster encoder."""

import copy
import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from mrl.alignment.encoders import PROBES, FileEncoder
from mrl.alignment.receiver import Receiver
from mrl.alignment.tiktoken_encoder import build_tiktoken_encoder
from mrl.alignment.tokenizer_file import TokenizerFile, read_tokenizer_file
from mrl.alignment.tokenizer_folder import find_eos
from mrl.errors import ModelFolderError
from tests.support.alignment_properties.generated import canonical_ids, make_text
from tests.support.alignment_properties.kinds import FAST, KINDS, METASPACE, PREFIXED, Receivers
from tests.support.alignment_properties.raising import never_raises

Change = Callable[[dict[str, Any]], None]


def expect_refused(what: object, load: Callable[[], object]) -> None:
    """Refused with the one error that a user is shown."""
    with never_raises(what):
        try:
            found = load()
        except ModelFolderError:
            return
    raise AssertionError(f"{what} is accepted: {found}")


def read_content(content: Mapping[str, Any]) -> TokenizerFile:
    """A `tokenizer.json` with this content, read."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        return read_tokenizer_file(Path(folder))


def changed(file: TokenizerFile, change: Change) -> dict[str, Any]:
    """The content of a file with one change."""
    content = copy.deepcopy(dict(file.content))
    change(content)
    return content


def check_files_are_read_for_what_they_are(receivers: Receivers, random: Random) -> None:
    """The kind and the phantom space are told by the decoder; a kind whose bytes cannot be known is refused."""
    for kind in KINDS:
        file = read_tokenizer_file(receivers.folders[kind])
        assert file.kind == ("metaspace" if kind in METASPACE else "byte_level")
        assert file.has_dummy_prefix == (kind in PREFIXED)
        assert file.reads_nfc == (kind == "byte_level_nfc")
    plain, metaspace = (read_tokenizer_file(receivers.folders[kind]) for kind in ("byte_level", "metaspace_prepend"))
    for file, lie in (
        (plain, {"model": {"type": "Unigram", "vocab": []}}),
        (plain, {"model": {"type": "WordPiece", "vocab": {"a": 0}}}),
        (plain, {"model": {"type": "BPE", "vocab": [["a", 0]]}}),
        (plain, {"model": None}),
        (plain, {"decoder": None}),
        (plain, {"decoder": {"type": "WordPiece"}}),
        (metaspace, {"model": dict(metaspace.content["model"]) | {"byte_fallback": False}}),
        (metaspace, {"decoder": {"type": "Fuse"}}),
    ):
        expect_refused(lie, lambda file=file, lie=lie: read_content(dict(file.content) | lie))
    expect_refused("a list", lambda: read_content([]))
    expect_refused("an empty folder", lambda: read_tokenizer_file(receivers.folders["metaspace"].parent))


def check_fingerprints_tell_what_matters(receivers: Receivers, random: Random) -> None:
    """Two files have one fingerprint when, and only when, ids and bytes belong together in the same way."""
    prints = [receivers[kind].fingerprint for kind in KINDS]
    assert len(set(prints)) == len(prints)
    for kind in KINDS:
        file = read_tokenizer_file(receivers.folders[kind])
        for change in (template, limits, merges_in_the_other_form, lambda content: content.update(version="9")):
            assert read_content(changed(file, change)).fingerprint == file.fingerprint, change
        for change in (swap_two_ids, drop_a_merge, drop_an_added_token, normalise):
            assert read_content(changed(file, change)).fingerprint != file.fingerprint, change


def template(content: dict[str, Any]) -> None:
    """A template that puts a special token first."""
    token = content["added_tokens"][0]
    specials = {token["content"]: {"id": token["content"], "ids": [token["id"]], "tokens": [token["content"]]}}
    first = {"SpecialToken": {"id": token["content"], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": specials,
    }


def limits(content: dict[str, Any]) -> None:
    """Truncation and padding to two tokens."""
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    how = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    content["padding"] = {"strategy": {"Fixed": 2}} | how


def merges_in_the_other_form(content: dict[str, Any]) -> None:
    """Pairs as text with a space between, as older files have them."""
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]


def swap_two_ids(content: dict[str, Any]) -> None:
    """Two pieces change places."""
    vocab = content["model"]["vocab"]
    vocab["y"], vocab["a"] = vocab["a"], vocab["y"]


def drop_a_merge(content: dict[str, Any]) -> None:
    """One pair fewer is joined."""
    content["model"]["merges"].pop()


def drop_an_added_token(content: dict[str, Any]) -> None:
    """One literal fewer is a token."""
    content["added_tokens"].pop()


def normalise(content: dict[str, Any]) -> None:
    """Text is put into NFKC first."""
    content["normalizer"] = {"type": "NFKC"}


def check_templates_and_limits_do_not_matter(receivers: Receivers, random: Random) -> None:
    """What a file says of prompts, padding and truncation changes no id of a text."""
    for kind in KINDS:
        file = read_tokenizer_file(receivers.folders[kind])
        told = read_content(changed(file, lambda content: (template(content), limits(content))))
        other = Receiver(told, eos_ids=receivers[kind].eos_ids, use_tiktoken=False)
        for text in ("reverse: yah", "x", "12 + 34 = 46"):
            assert canonical_ids(other, text) == canonical_ids(receivers[kind], text)


def check_ends_are_found_in_order(receivers: Receivers, random: Random) -> None:
    """generation_config before config before the tokenizer's own; the tokenizer's own first among several."""
    file = read_tokenizer_file(receivers.folders["byte_level"])
    named = {token["content"]: token["id"] for token in file.added_tokens} | {"y": file.content["model"]["vocab"]["y"]}
    ids = [*named.values(), 3, 4]
    for _ in range(60):
        eos = random.choice([None, *named, "nobody's"])
        own = {"eos_token": {"content": eos} if eos and random.random() < 0.5 else eos}
        lists = [random.choice([None, [], random.choice(ids), random.sample(ids, 3), ["x", 4]]) for _ in range(2)]
        given = [[one] if isinstance(one, int) else [i for i in one or [] if isinstance(i, int)] for one in lists]
        first = next((one for one in given if one), [named[eos]] if eos in named else [])
        expected = [named[eos], *(i for i in first if i != named[eos])] if named.get(eos) in first else first
        contents = {"tokenizer_config": own, "generation_config": {"eos_token_id": lists[0]}}
        contents["config"] = {"eos_token_id": lists[1]}
        with tempfile.TemporaryDirectory() as folder:
            for name, content in contents.items():
                if any(value is not None for value in content.values()) or random.random() < 0.5:
                    (Path(folder) / f"{name}.json").write_text(json.dumps(content))
            if expected:
                with never_raises(contents):
                    assert find_eos(Path(folder), file) == tuple(expected), contents
            else:
                expect_refused(contents, lambda folder=folder: find_eos(Path(folder), file))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text('{"eos_token_id": 1000000}')
        expect_refused("an id that is no token", lambda: find_eos(Path(folder), file))
        (Path(folder) / "config.json").write_text("{")
        expect_refused("broken JSON", lambda: find_eos(Path(folder), file))


def check_both_encoders_give_the_same_ids(receivers: Receivers, random: Random) -> None:
    """tiktoken's ids are the file's, row by row, for every kind that it serves, added tokens and all."""
    odd = (
        "\u180e",
        "\U0001e900",
        "\u0661\u0662",
        "\U0010fffe\U0010ffff",
        "'s",
        "DON'T",
        "<th\u00efnk><th\u00efnk>",
        "\u2167",
    )
    for kind in FAST:
        fast, slow = receivers[kind], receivers[kind.removesuffix(" by tiktoken")]
        assert (fast.encodes_with, slow.encodes_with) == ("tiktoken", "tokenizers")
        texts = ["", *(make_text(random) + random.choice(odd) + make_text(random) for _ in range(40))]
        one, other = (receiver.cut_texts(texts, [text.encode() for text in texts]) for receiver in (fast, slow))
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.offsets.tolist() == other.offsets.tolist()
        assert one.faults == other.faults
        assert fast.cut_texts([], []).offsets.tolist() == [0]


def unsettle(content: dict[str, Any]) -> None:
    """Add a piece that its own bytes do not lead to: an earlier merge takes them apart."""
    model, content["added_tokens"] = content["model"], content["added_tokens"][:1]
    for left, right in (("Q", "X"), ("X", "Z"), ("Q", "XZ")):
        model["vocab"][left + right] = max(model["vocab"].values()) + 1
        model["merges"].append([left, right])


def split_on_digits(content: dict[str, Any]) -> None:
    """Cut in a second way first."""
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}


def trim_added(content: dict[str, Any]) -> None:
    """An added token that eats the spaces before it."""
    content["added_tokens"][-1]["lstrip"] = True


def replace_text(content: dict[str, Any]) -> None:
    """A normalizer that no probe meets."""
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "zzz"}, "content": "y"}


def nest_added(content: dict[str, Any]) -> None:
    """An added token inside another."""
    added = content["added_tokens"]
    index = max(*content["model"]["vocab"].values(), *(token["id"] for token in added)) + 1
    added.append(dict(added[-1]) | {"content": "x" + added[-1]["content"], "id": index})


def lose_a_byte(content: dict[str, Any]) -> None:
    """A byte that no piece stands for."""
    vocab = content["model"]["vocab"]
    vocab["\u00ff" * 3] = vocab.pop("\u00ff")


CHANGES = (unsettle, split_on_digits, trim_added, replace_text, nest_added, lose_a_byte)


def check_what_is_not_shown_to_agree_is_not_used(receivers: Receivers, random: Random) -> None:
    """Merges that ranks cannot say, other ways of cutting, and tokens that eat spaces keep the file's encoder."""
    plain = read_tokenizer_file(receivers.folders["byte_level"])
    for change in CHANGES:
        file = dataclasses.replace(plain, content=changed(plain, change))
        assert build_tiktoken_encoder(file, FileEncoder(file), PROBES) is None, change.__name__
    metaspace = read_tokenizer_file(receivers.folders["metaspace"])
    assert build_tiktoken_encoder(metaspace, FileEncoder(metaspace), PROBES) is None
    other = dataclasses.replace(plain, content=changed(plain, split_on_digits))
    assert build_tiktoken_encoder(plain, FileEncoder(other), PROBES) is None, "a reference with other ids"


class DevanagariInLetters:
    """An encoder that differs from the file's in one block of Unicode."""

    def __init__(self, reference: FileEncoder) -> None:
        self.reference = reference

    def encode(self, texts):
        """Texts with Devanagari with a space after every character."""
        return self.reference.encode([" ".join(text) if "\u0930" in text else text for text in texts])


def check_blocks_that_differ_are_left_to_the_file(receivers: Receivers, random: Random) -> None:
    """Texts with characters on which the two encoders disagree get the file's ids, texts without stay fast."""
    file = read_tokenizer_file(receivers.folders["byte_level"])
    odd = DevanagariInLetters(FileEncoder(file))
    encoder = build_tiktoken_encoder(file, odd, PROBES)
    assert encoder is not None
    texts = ["reverse yah", "\u0930\u0940 reverse", "\u0930a", "caf\u00e9", "\u0930", ""]
    random.shuffle(texts)
    found, expected = encoder.encode(texts), odd.encode(texts)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert np.array_equal(found.offsets, expected.offsets)
