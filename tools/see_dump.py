"""One record, or the bytes of a file from the exchange's folder, as lines for a person.

Nothing here trusts what it reads: whole records are checked against their type, and shown by the plain msgpack reader
whether or not they pass; damaged bytes are searched for what may once have been an entry.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from see_values import shown_text, value_lines, walked

from mrl.errors import RecordError, RunFolderError
from mrl.exchange.journal import Stored, bodies_of, read
from mrl.exchange.log.frames import END, ENTRY, HEADER, MAX_PAYLOAD_BYTES, Damage, claims_in, format_of
from mrl.exchange.log.reading import entries_in, frames_of
from mrl.exchange.log.recovery import segment_at
from mrl.records.codec import decode, decoder
from mrl.records.experience import experience_decoder, raw_pack_decoder

MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_FRAMES = 100
MAX_LINES = 4000
HEX_BYTES, HEX_ROW = 256, 16
TYPE = b"\xa4type"
"""The first key of a record or an entry, as msgpack has it."""
KINDS = {HEADER: "header", ENTRY: "entry", END: "end"}


class _Named(msgspec.Struct):
    """The one field by which a record is found."""

    record_id: str = ""


_named_decoder: msgspec.msgpack.Decoder[Any] = decoder(_Named)


def record_lines(body: bytes, *, found: str) -> Iterator[str]:
    """An encoded record; `found` says where it is."""
    yield f"{len(body)} bytes, {found}"
    yield f"as a record: {_verdict(body)}"
    yield from value_lines(body)


def find_on_log(folder: Path, record_id: str) -> tuple[int, bytes] | None:
    """(offset of the entry, record) of the last copy of a record on the log in `folder`; None when there is none."""
    found = None
    try:
        for offset, payload in entries_in(folder):
            for body in _records_of(payload):
                if _id_of(body) == record_id:
                    found = offset, body
    except OSError as error:
        raise RunFolderError(f"the log cannot be read ({error.strerror})", where=str(folder)) from error
    return found


def file_lines(path: Path) -> Iterator[str]:
    """A file: the frames of a segment, or whatever can be made out in a damaged stretch. Raises RunFolderError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
        size_bytes = path.stat().st_size
        lines = _segment_lines(path) if format_of(data) and segment_at(path) else _stretch_lines(data)
        yield f"{path}: {size_bytes} bytes"
        if size_bytes > len(data) and not format_of(data):
            yield f"only the first {len(data)} bytes are looked at"
        for number, line in enumerate(lines):
            if number == MAX_LINES:
                yield f"... more than {MAX_LINES} lines"
                return
            yield line
    except OSError as error:
        raise RunFolderError(f"cannot be read ({error.strerror})", where=str(path)) from error


def _segment_lines(path: Path) -> Iterator[str]:
    segment = segment_at(path)
    if segment is None:
        return
    for number, item in enumerate(frames_of(segment)):
        if number == MAX_FRAMES:
            yield f"... more than {MAX_FRAMES} frames"
            return
        offset = segment.first_offset + item.position
        if isinstance(item, Damage):
            yield f"offset {offset}: {item.end - item.position} bytes damaged or unfinished"
            continue
        yield f"offset {offset}: {KINDS[item.kind]} of {len(item.payload)} bytes, checksums hold"
        yield from _indented(_payload_lines(item.kind, item.payload)) if item.payload else ()


def _payload_lines(kind: int, payload: bytes) -> Iterator[str]:
    """The head of an entry and the arrays behind it, one after the other; of a header its snapshot."""
    end = 4 + int.from_bytes(payload[:4], "little")
    if kind != ENTRY or not 4 < end <= len(payload):
        yield from value_lines(payload)
        return
    yield from value_lines(payload[4:end])
    while end < len(payload):
        lines, length = walked(payload[end:])
        yield from lines
        if length <= 0:
            return
        end += length


def _stretch_lines(data: bytes) -> Iterator[str]:
    """Bytes in which no whole frame was found."""
    num_claims = 0
    for claim in claims_in(data):
        if num_claims == MAX_FRAMES:
            yield f"... more than {MAX_FRAMES} of these"
            break
        num_claims += 1
        state = "its checksum holds" if claim.is_whole else "its checksum does not hold"
        cut = "" if len(claim.payload) == claim.length else f", {len(claim.payload)} of them here"
        yield f"byte {claim.position}: perhaps an {KINDS[claim.kind]} of {claim.length} bytes{cut}; {state}"
        yield from _indented(_payload_lines(claim.kind, claim.payload))
    if not num_claims:
        yield "nothing in it looks like an entry of the log"
        yield from _map_lines(data)
    yield from _hex_lines(data[:HEX_BYTES])


def _map_lines(data: bytes) -> Iterator[str]:
    """What may be left of records and entries: maps that begin with their type, none inside a whole one."""
    start, num_maps = 0, 0
    while num_maps < MAX_FRAMES and (found := data.find(TYPE, start)) >= 0:
        start = found + len(TYPE)
        if found and 0x81 <= data[found - 1] <= 0x8F:
            num_maps += 1
            lines, length = walked(data[found - 1 :])
            yield f"byte {found - 1}: perhaps a record or an entry"
            yield from _indented(lines)
            if _is_whole(data[found - 1 : found - 1 + length]):  # a broken one may have swallowed the next
                start = found - 1 + length
    if not num_maps:
        yield "nor is there a record in it; as plain msgpack:"
        yield from _indented(value_lines(data))


def _hex_lines(data: bytes) -> Iterator[str]:
    yield f"the first {len(data)} bytes:"
    for start in range(0, len(data), HEX_ROW):
        row = data[start : start + HEX_ROW]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"  {start:08x}  {row.hex(' '):<{3 * HEX_ROW}} {text}"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _records_of(payload: bytes) -> Iterator[bytes]:
    try:
        entry, begin = read(payload)
        arrays = [body for _, body, _ in bodies_of(entry, payload, begin)] if isinstance(entry, Stored) else []
        yield from (bytes(raw) for array in arrays for raw in decode(array, raw_pack_decoder, max_bytes=len(array)))
    except RecordError:
        return


def _id_of(body: bytes) -> str:
    try:
        return str(decode(body, _named_decoder).record_id)
    except RecordError:
        return ""


def _is_whole(body: bytes) -> bool:
    with contextlib.suppress(RecordError):
        decode(body, experience_decoder, max_bytes=MAX_PAYLOAD_BYTES)
        return True
    with contextlib.suppress(RecordError):
        read(body)
        return True
    return False


def _verdict(body: bytes) -> str:
    try:
        return f"whole, {type(decode(body, experience_decoder)).__name__}"
    except RecordError as error:
        return shown_text(str(error))
