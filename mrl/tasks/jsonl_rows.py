"""The rows of a JSONL file: one JSON object a line, as UTF-8, with or without a byte order mark.

A file in another encoding, an empty file, and a line that is too long for a row are refused with the line and a cure.
"""

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.errors import MissingError, TaskError
from mrl.records.canonical_json import strict_json

MAX_LINE_BYTES = 8 * 1024 * 1024
"""Longest row. A verifier that takes the row gets it through a pipe with every answer."""
SHOWN_CHARS = 60
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks, longer ones first: that of UTF-32 begins like that of UTF-16."""


def jsonl_rows(path: Path, *, where: str, get: str, form: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, row) of every line; lines of white space are skipped.

    Raises MissingError without the file. Raises TaskError for a line that is no JSON object, for a line with a key
    given twice, for a line of more than `MAX_LINE_BYTES`, for an empty file, and for text that is not UTF-8. `form`
    says in words what the file should hold, `get` is the command that fetches it.
    """
    if not path.is_file():
        raise MissingError(
            f"data file {str(path)!r} does not exist{relative_to(path)}", where=where, wanted=form, cure=get
        )
    num_rows, number = 0, 0
    with path.open("rb") as lines:
        _check_mark(lines.read(4), path)
        lines.seek(0)
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{path}:{number}"
            text = _text(line, place, path)
            if number == 1:
                text = text.removeprefix("\ufeff")
            if text.strip():
                num_rows += 1
                yield place, _row(text.strip(), place, form)
    if not num_rows:
        what = "the file is empty" if not number else "the file has only blank lines"
        raise TaskError(what, where=str(path), wanted=form, cure=get or "add the prompts to the file")


def nothing(_: str) -> None:
    """Return None for NaN and infinities in a row: JSON has none, and in tables they stand for a missing value."""


def relative_to(path: Path) -> str:
    """Return in words the folder that a relative path starts from; empty for an absolute path."""
    return "" if path.is_absolute() else f" (relative to the working directory {Path.cwd()})"


def _check_mark(first: bytes, path: Path) -> None:
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if first.startswith(mark):
            raise _other_encoding(f"{path}:1", encoding, path)


def _text(line: bytes, place: str, path: Path) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise TaskError(
            "the line is too long",
            where=place,
            got=f"more than {MAX_LINE_BYTES:,} bytes",
            wanted=f"one JSON object per line, of at most {MAX_LINE_BYTES:,} bytes",
            cure="write one row per line, or remove the row",
        )
    if b"\0" in line:
        raise _other_encoding(place, "UTF-16", path)
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = line[error.start : error.start + 1].hex()
        raise _other_encoding(
            place, "LATIN1", path, f"the byte 0x{found} at offset {error.start} of the line"
        ) from None


def _other_encoding(place: str, encoding: str, path: Path, got: str = "") -> TaskError:
    written = "iconv -f {} -t UTF-8 {} > {}".format(encoding, path, path.with_suffix(".utf8.jsonl"))
    guess = f" (if the file is not {encoding}, give its actual encoding)" if got else ""
    return TaskError(
        "the text is not UTF-8", where=place, got=got or f"{encoding} text", wanted="UTF-8", cure=f"{written}{guess}"
    )


def _row(line: str, place: str, form: str) -> Mapping[str, Any]:
    try:
        row = strict_json(line, nothing)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        what, cure = f"unpaired surrogate {half}", "write the complete surrogate pair, or remove it"
        raise TaskError(what, where=place, got=line[:SHOWN_CHARS], cure=cure) from error
    except (ValueError, RecursionError) as error:
        cure = (
            "write each object on one line; a list over several lines is not JSONL"
            if line[:1] in "[{" and len(line) < 3
            else ""
        )
        at = f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise TaskError(f"not valid JSON: {at}", where=place, got=line[:SHOWN_CHARS], wanted=form, cure=cure) from error
    if not isinstance(row, dict):
        raise TaskError("not a JSON object", where=place, got=line[:SHOWN_CHARS], wanted=form)
    return row
