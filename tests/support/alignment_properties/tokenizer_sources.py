"""Tokenizers as they are read: kinds and fingerprints, ends, rank files, and the faster encoder."""

import base64
import copy
import dataclasses
import json
import tempfile
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Regex, pre_tokenizers

from mrl.alignment.encoders import PROBES, FileEncoder
from mrl.alignment.rank_file import PATTERNS, load_tekken, load_tiktoken_ranks
from mrl.alignment.receiver import Receiver, load_receiver
from mrl.alignment.tiktoken_encoder import build_tiktoken_encoder
from mrl.alignment.tokenizer_file import TokenizerFile, read_tokenizer_file
from mrl.alignment.tokenizer_folder import find_eos
from mrl.errors import ModelFolderError
from tests.support.alignment_properties.definitions import slow_rank_encoding
from tests.support.alignment_properties.generated import canonical_ids, make_text
from tests.support.alignment_properties.kinds import BYTE_LEVEL, FAST, METASPACE, PREFIXED, RANK_SPECIALS, Receivers
from tests.support.alignment_properties.raising import never_raises

FOLDERS = (*BYTE_LEVEL[:3], *METASPACE)
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
    for kind in FOLDERS:
        file = read_tokenizer_file(receivers.sources[kind])
        assert file.kind == ("metaspace" if kind in METASPACE else "byte_level")
        assert file.has_dummy_prefix == (kind in PREFIXED)
        assert file.reads_nfc == (kind == "byte_level_nfc")
    plain, metaspace = (read_tokenizer_file(receivers.sources[kind]) for kind in ("byte_level", "metaspace_prepend"))
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
    expect_refused("an empty folder", lambda: read_tokenizer_file(receivers.sources["ranks"].parent))


def check_fingerprints_tell_what_matters(receivers: Receivers, random: Random) -> None:
    """Two files have one fingerprint when, and only when, ids and bytes belong together in the same way."""
    prints = [receivers[kind].fingerprint for kind in (*BYTE_LEVEL, *METASPACE)]
    assert len(set(prints)) == len(prints)
    for kind in FOLDERS:
        file = read_tokenizer_file(receivers.sources[kind])
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
    for kind in FOLDERS:
        file = read_tokenizer_file(receivers.sources[kind])
        told = read_content(changed(file, lambda content: (template(content), limits(content))))
        other = Receiver(told, eos_ids=receivers[kind].eos_ids, use_tiktoken=False)
        for text in ("reverse: yah", "x", "12 + 34 = 46"):
            assert canonical_ids(other, text) == canonical_ids(receivers[kind], text)


def check_ends_are_found_in_order(receivers: Receivers, random: Random) -> None:
    """generation_config before config before the tokenizer's own; the tokenizer's own first among several."""
    file = read_tokenizer_file(receivers.sources["byte_level"])
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


def ranks_of(path: Path) -> dict[bytes, int]:
    """The lines of a tiktoken file."""
    pairs = [line.split() for line in path.read_bytes().splitlines()]
    return {base64.b64decode(piece): int(rank) for piece, rank in pairs}


def check_rank_files_give_their_ranks(receivers: Receivers, random: Random) -> None:
    """Ids are those of byte-pair encoding by ranks, pre-token by pre-token; tekken's follow its special tokens."""
    ranks = ranks_of(receivers.sources["ranks"])
    tekken = json.loads(receivers.sources["tekken"].read_text())["config"]["pattern"]
    for kind, pattern, shift in (
        ("ranks", PATTERNS["llama3"], 0),
        ("ranks_nfc", PATTERNS["qwen"], 0),
        ("tekken", tekken, 10),
    ):
        receiver, splitter = receivers[kind], pre_tokenizers.Split(Regex(pattern), "isolated")
        for _ in range(30):
            letters = "".join(random.choice("reversyahunlmpdtf ") for _ in range(20))
            text = random.choice(("WVYK\n", "WVYKx", "12345\n")) + make_text(random) + letters
            text = unicodedata.normalize("NFC", text) if kind == "ranks_nfc" else text
            pieces = [piece.encode() for piece, _ in splitter.pre_tokenize_str(text)]
            assert canonical_ids(receiver, text) == [rank + shift for rank in slow_rank_encoding(pieces, ranks)]
        assert receiver.table.pieces[shift : shift + len(ranks)] == tuple(ranks)
    assert receivers["ranks"].table.special_ids == set(RANK_SPECIALS.values())
    assert receivers["ranks"].eos_ids == (RANK_SPECIALS["<|im_end|>"],)
    assert receivers["tekken"].table.special_ids == set(range(10))
    assert receivers["tekken"].eos_ids == (2,)
    assert (receivers["ranks"].reads_nfc, receivers["ranks_nfc"].reads_nfc) == (False, True)


def check_broken_rank_files_are_refused(receivers: Receivers, random: Random) -> None:
    """Files that are cut, hold other things or name no end are the user's to cure: one clear error."""
    good = receivers.sources["ranks"].read_bytes()
    tekken = json.loads(receivers.sources["tekken"].read_text())
    bad_ranks = (
        b"no base64 at all\n",
        good.replace(b"eWFo", b"eW!Fo"),
        b"YQ== 1 2\n",
        b"YQ== x\n",
        b"".join(good.splitlines(keepends=True)[:100]),
    )
    bad_tekken = [[], {}, {"config": tekken["config"]}, tekken | {"config": {}}, tekken | {"vocab": [7]}]
    bad_tekken.append(tekken | {"vocab": tekken["vocab"][:100]})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks"
        how = {"pattern": "qwen", "use_tiktoken": False}
        for data in bad_ranks:
            path.write_bytes(data)
            expect_refused(data[:40], lambda: load_tiktoken_ranks(path, special_tokens={}, **how))
        path.write_bytes(good)
        taken = {"<|im_end|>": random.randrange(256)}
        expect_refused("an id that is taken", lambda: load_tiktoken_ranks(path, special_tokens=taken, **how))
        expect_refused("an EOS", lambda: load_tiktoken_ranks(path, special_tokens=RANK_SPECIALS, eos="none", **how))
        for content in bad_tekken:
            path.write_text(json.dumps(content))
            expect_refused(str(content)[:40], lambda: load_tekken(path, use_tiktoken=False))
        path.write_text(json.dumps(tekken | {"special_tokens": [{"rank": 7, "token_str": "<end>"}]}))
        with never_raises("a named end"):
            assert load_tekken(path, eos="<end>", use_tiktoken=False).eos_ids == (7,)
        expect_refused("no such EOS", lambda: load_tekken(path, eos="</s>", use_tiktoken=False))


def check_folders_of_rank_files_are_read(receivers: Receivers, random: Random) -> None:
    """A model folder with a rank file alone is the tokenizer of that file; what the file leaves open is asked for."""
    tokens = [{"id": index, "content": name, "special": True} for name, index in RANK_SPECIALS.items()]
    tokens.append({"id": 9005, "content": "<tool>", "special": False})
    settings = {"pat_str": PATTERNS["llama3"], "eos_token": "<|im_end|>"}
    settings["added_tokens_decoder"] = {str(token["id"]): token for token in tokens}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expect_refused("an empty folder", lambda: load_receiver(folder))
        (folder / "a.tiktoken").write_bytes(receivers.sources["ranks"].read_bytes())
        expect_refused("ranks without an expression", lambda: load_receiver(folder))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        with never_raises(settings):
            found = load_receiver(folder, use_tiktoken=False)
        assert found.eos_ids == receivers["ranks"].eos_ids
        assert found.table.special_ids == receivers["ranks"].table.special_ids
        assert canonical_ids(found, "yah<tool></s>")[-len(canonical_ids(found, "</s>")) - 1] == 9005
        assert found.table.pieces[9005] == b"<tool>"
        (folder / "b.tiktoken").write_bytes(receivers.sources["ranks"].read_bytes())
        expect_refused("two rank files", lambda: load_receiver(folder))
        (folder / "tokenizer_config.json").unlink()
        (folder / "tekken.json").write_bytes(receivers.sources["tekken"].read_bytes())
        with never_raises("a tekken file alone"):
            mistral = load_receiver(folder, use_tiktoken=False)
        assert (mistral.fingerprint, mistral.eos_ids) == (receivers["tekken"].fingerprint, (2,))


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
    plain = read_tokenizer_file(receivers.sources["byte_level"])
    for change in CHANGES:
        file = dataclasses.replace(plain, content=changed(plain, change))
        assert build_tiktoken_encoder(file, FileEncoder(file), PROBES) is None, change.__name__
    metaspace = read_tokenizer_file(receivers.sources["metaspace"])
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
    file = read_tokenizer_file(receivers.sources["byte_level"])
    odd = DevanagariInLetters(FileEncoder(file))
    encoder = build_tiktoken_encoder(file, odd, PROBES)
    assert encoder is not None
    texts = ["reverse yah", "\u0930\u0940 reverse", "\u0930a", "caf\u00e9", "\u0930", ""]
    random.shuffle(texts)
    found, expected = encoder.encode(texts), odd.encode(texts)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert np.array_equal(found.offsets, expected.offsets)
