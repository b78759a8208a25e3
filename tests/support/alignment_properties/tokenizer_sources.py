"""Tokenizers as read from their files: kinds, fingerprints, and ends."""

import copy
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from mrl.alignment.receiver import Receiver
from mrl.alignment.tokenizer_file import TokenizerFile, read_tokenizer_file
from mrl.alignment.tokenizer_folder import find_eos
from mrl.errors import ModelFolderError
from tests.support.alignment_properties.generated import canonical_ids
from tests.support.alignment_properties.kinds import KINDS, METASPACE, PREFIXED, Receivers
from tests.support.alignment_properties.raising import never_raises

Change = Callable[[dict[str, Any]], None]


def expect_refused(what: object, load: Callable[[], object]) -> None:
    """Check that loading is refused with ModelFolderError, the error that users are shown."""
    with never_raises(what):
        try:
            found = load()
        except ModelFolderError:
            return
    raise AssertionError(f"{what} is accepted: {found}")


def read_content(content: Mapping[str, Any]) -> TokenizerFile:
    """Read a `tokenizer.json` with this content."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        return read_tokenizer_file(Path(folder))


def changed(file: TokenizerFile, change: Change) -> dict[str, Any]:
    """Return the content of a file with one change."""
    content = copy.deepcopy(dict(file.content))
    change(content)
    return content


def check_files_are_read_for_what_they_are(receivers: Receivers, random: Random) -> None:
    """The decoder tells kind and phantom space; a kind whose bytes cannot be known is refused."""
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
    """Add a template that puts a special token first."""
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
    """Add truncation and padding to two tokens."""
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    how = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    content["padding"] = {"strategy": {"Fixed": 2}} | how


def merges_in_the_other_form(content: dict[str, Any]) -> None:
    """Write merges as text with a space between, as older files have them."""
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]


def swap_two_ids(content: dict[str, Any]) -> None:
    """Swap the ids of two pieces."""
    vocab = content["model"]["vocab"]
    vocab["y"], vocab["a"] = vocab["a"], vocab["y"]


def drop_a_merge(content: dict[str, Any]) -> None:
    """Remove a merge."""
    content["model"]["merges"].pop()


def drop_an_added_token(content: dict[str, Any]) -> None:
    """Remove an added token."""
    content["added_tokens"].pop()


def normalise(content: dict[str, Any]) -> None:
    """Add a normalizer that puts text into NFKC."""
    content["normalizer"] = {"type": "NFKC"}


def check_templates_and_limits_do_not_matter(receivers: Receivers, random: Random) -> None:
    """Templates, padding and truncation of a file change no id of a text."""
    for kind in KINDS:
        file = read_tokenizer_file(receivers.folders[kind])
        told = read_content(changed(file, lambda content: (template(content), limits(content))))
        other = Receiver(told, eos_ids=receivers[kind].eos_ids)
        for text in ("reverse: yah", "x", "12 + 34 = 46"):
            assert canonical_ids(other, text) == canonical_ids(receivers[kind], text)


def check_ends_are_found_in_order(receivers: Receivers, random: Random) -> None:
    """EOS ids come from generation_config, else config, else the tokenizer, whose own is first among several."""
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
