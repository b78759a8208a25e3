"""Reading of `tokenizer.json` for how ids and bytes belong together.

The kind is told by the decoder, because the decoder is the part that turns pieces into text; class names mislead.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mrl.alignment.tokenizer_refusals import model_fault
from mrl.errors import ModelFolderError, TokenizerRefused

Kind = Literal["byte_level", "metaspace"]
METASPACE = "\u2581"
TOKENIZER_FILE = "tokenizer.json"
"""Name of the file of a tokenizer in the form of the tokenizers library."""
DETERMINING = ("model", "normalizer", "pre_tokenizer", "decoder", "added_tokens")


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A parsed `tokenizer.json`."""

    path: Path
    content: Mapping[str, Any]
    kind: Kind
    has_dummy_prefix: bool
    """Whether encoding puts one phantom space before every text."""

    @property
    def pieces(self) -> dict[int, str]:
        """Id -> piece of the model's vocabulary, without added tokens."""
        return {index: piece for piece, index in self.content["model"]["vocab"].items()}

    @property
    def added_tokens(self) -> list[Mapping[str, Any]]:
        """The added tokens, each with `id`, `content` and `special`."""
        return list(self.content.get("added_tokens") or [])

    @property
    def reads_nfc(self) -> bool:
        """Whether encoding puts every text into NFC first."""
        return any(step.get("type") == "NFC" for step in steps(self.content.get("normalizer")))

    @property
    def fingerprint(self) -> str:
        """Digest of everything that determines which bytes an id stands for and which ids a text gets.

        Padding, truncation, templates and the layout of the file do not count.
        """
        determining = {key: self.content.get(key) for key in DETERMINING}
        model = dict(self.content["model"])
        model["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        text = json.dumps(determining | {"model": model}, sort_keys=True, separators=(",", ":"))
        return "blake2b:" + hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    def exact_json(self) -> str:
        """Return the content for an encoder that adds and drops nothing: no dummy prefix, template, truncation or
        padding.
        """
        inert = {"post_processor": None, "truncation": None, "padding": None}
        plain = {key: _without_prefix(self.content.get(key)) for key in ("normalizer", "pre_tokenizer")}
        return json.dumps(dict(self.content) | inert | plain)


def read_tokenizer_file(folder: Path) -> TokenizerFile:
    """Read `folder/tokenizer.json`.

    Raises ModelFolderError when it is missing or malformed, TokenizerRefused for a kind whose bytes cannot be known
    exactly.
    """
    path = folder / TOKENIZER_FILE
    content = _read_json(path)
    model = content.get("model") or {}
    if not isinstance(model, dict):
        raise ModelFolderError("the tokenizer's model is not a JSON object", where=str(path), got=type(model).__name__)
    decoders = list(steps(content.get("decoder")))
    names = {step.get("type") for step in decoders}
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise _refused(path, content, f"model {model.get('type')}")
    if "ByteLevel" in names:
        return TokenizerFile(path, content, "byte_level", has_dummy_prefix=False)
    if model.get("byte_fallback") and names & {"ByteFallback", "Metaspace"}:
        return TokenizerFile(path, content, "metaspace", has_dummy_prefix=_strips_prefix(decoders))
    raise _refused(path, content, f"decoder {'+'.join(sorted(map(str, names))) or 'none'}")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        cure = "save the tokenizer in its fast form (save_pretrained), which writes tokenizer.json"
        raise ModelFolderError("cannot read the tokenizer", where=str(path), got=error.strerror, cure=cure) from error
    except ValueError as error:
        raise ModelFolderError("the tokenizer is not valid JSON", where=str(path), got=str(error)) from error
    if not isinstance(content, dict):
        raise ModelFolderError("the tokenizer is not a JSON object", where=str(path), got=type(content).__name__)
    return content


def optional_json(path: Path) -> Mapping[str, Any]:
    """Return the object of a JSON file; empty where there is no file. Raises ModelFolderError for a broken file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError("cannot read a configuration file", where=str(path), got=str(error)) from error
    return content if isinstance(content, dict) else {}


def _refused(path: Path, content: Mapping[str, Any], got: str) -> TokenizerRefused:
    return TokenizerRefused(
        f"a tokenizer of this kind cannot be aligned exactly: {model_fault(content)}",
        where=str(path),
        got=got,
        wanted="byte-level BPE, or metaspace BPE with byte fallback",
        cure="use a model of another family, or remove this policy",
    )


def steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, sequences unrolled."""
    if part is None:
        return
    if part.get("type") != "Sequence":
        yield part
    for key in ("decoders", "normalizers", "pretokenizers"):
        for step in part.get(key) or []:
            yield from steps(step)


def _strips_prefix(decoders: list[Mapping[str, Any]]) -> bool:
    for step in decoders:
        if step.get("type") == "Strip" and step.get("content") in (" ", METASPACE) and step.get("start"):
            return True
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _without_prefix(part: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the normalizer or pre-tokenizer without the steps, or settings of steps, that add a leading space."""
    if part is None or part.get("type") == "Prepend":
        return None
    changed = dict(part)
    for key in ("normalizers", "pretokenizers"):
        if key in changed:
            kept = [_without_prefix(step) for step in changed[key]]
            changed[key] = [step for step in kept if step is not None]
    if changed.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
    if changed.get("type") == "ByteLevel":
        changed["add_prefix_space"] = False
    return changed
