"""Frames: what was written is found again, and nothing else is ever taken for it."""

import os
import struct
import zlib

import pytest
from xxhash import xxh3_64_intdigest

from mrl.exchange.log.frames import (
    BLOCK_BYTES,
    END,
    ENTRY,
    FORMAT,
    HEAD_BYTES,
    HEADER,
    MAGIC,
    PREFIX_BYTES,
    Damage,
    Frame,
    FrameScan,
    checksum_of,
    format_of,
    head,
    prefix,
)

SALT, FIRST = 0x0123456789ABCDEF, 7_000_000_000
PAYLOADS = [b"snapshot", b"one", b"", b"two" * 20, b"\0" * 5]


def file_of(payloads=PAYLOADS, *, salt=SALT, first=FIRST) -> bytes:
    """A file as a segment is written: the first payload is its header's."""
    data = bytearray(prefix())
    for number, payload in enumerate(payloads):
        data += head(ENTRY if number else HEADER, [payload], first + len(data), salt) + payload
    return bytes(data)


def scan(data: bytes, *, salt=SALT, first=FIRST, asked=None) -> list[Frame | Damage]:
    """Everything in `data`; `asked` collects the lengths of the reads."""

    def read_at(length, position):
        if asked is not None:
            asked.append(length)
        return data[position : position + length]

    return list(FrameScan(read_at, size_bytes=len(data), first_offset=first, salt=salt))


def payloads_in(items) -> list[bytes]:
    """Of the frames."""
    return [item.payload for item in items if isinstance(item, Frame)]


def test_frames_come_back_with_kind_and_position():
    """The header first; positions follow each other without a gap."""
    items = scan(file_of())
    assert payloads_in(items) == PAYLOADS
    assert [item.kind for item in items] == [HEADER] + [ENTRY] * 4
    assert [item.position for item in items] == [PREFIX_BYTES, *(item.end for item in items[:-1])]
    assert items[-1].end == len(file_of())


def test_a_flipped_bit_costs_only_the_frame_that_holds_it():
    """At every bit of the file: the other frames are there, and the damage is exactly as long as that frame."""
    data, whole = file_of(), scan(file_of())
    for bit in range(len(data) * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        items = scan(bytes(broken))
        hit = next((frame for frame in whole if frame.position <= bit // 8 < frame.end), None)
        assert [item for item in items if isinstance(item, Frame)] == [frame for frame in whole if frame != hit]
        expected = (hit.position, hit.end) if hit else (0, PREFIX_BYTES)
        assert [item for item in items if isinstance(item, Damage)] == [Damage(*expected)]


def test_a_file_cut_at_any_length_keeps_its_whole_frames():
    """What is left of the last frame is one damaged stretch at the end."""
    data, whole = file_of(), scan(file_of())
    for size in range(PREFIX_BYTES, len(data)):
        kept = [frame for frame in whole if frame.end <= size]
        end = kept[-1].end if kept else PREFIX_BYTES
        assert scan(data[:size]) == kept + ([Damage(end, size)] if end < size else [])


@pytest.mark.parametrize("tail", [bytes(5000), b"\xff" * 5000, b"RM" * 2500, b"RM\2\0" * 1250, os.urandom(5000)])
def test_garbage_is_no_frame(tail):
    """Zeros, as some file systems leave them, and marks without anything behind them included."""
    size = len(file_of())
    assert scan(file_of() + tail) == [*scan(file_of()), Damage(size, size + 5000)]


@pytest.mark.parametrize(("salt", "shift"), [(SALT + 1, 0), (SALT, 1), (SALT, -FIRST)])
def test_a_frame_inside_a_payload_is_never_found(salt, shift):
    """A client does not know the salt; and with the salt, only the frame's own place would do."""
    begin = len(file_of([b"", b"before"]))
    inner_offset = FIRST + begin + HEAD_BYTES
    inner = head(ENTRY, [b"smuggled"], inner_offset + shift, salt) + b"smuggled"
    data = bytearray(file_of([b"", b"before", inner, b"after"]))
    data[begin] ^= 1
    assert payloads_in(scan(bytes(data))) == [b"", b"before", b"after"]


def test_such_a_frame_would_be_found_if_salt_and_place_were_right():
    """The test above does not pass for another reason."""
    begin = len(file_of([b"", b"before"]))
    inner = head(ENTRY, [b"smuggled"], FIRST + begin + HEAD_BYTES, SALT) + b"smuggled"
    data = bytearray(file_of([b"", b"before", inner, b"after"]))
    data[begin] ^= 1
    assert payloads_in(scan(bytes(data))) == [b"", b"before", b"smuggled", b"after"]


def test_behind_an_end_nothing_counts():
    """Whatever stands there is of an earlier life of the file, or was never finished."""
    data, whole = file_of(), scan(file_of())
    end = head(END, (), FIRST + len(data), SALT)
    place = FIRST + len(data) + HEAD_BYTES + 100
    later = bytes(100) + head(ENTRY, [b"later"], place, SALT) + b"later"  # all that is left of a group
    for old in (b"", bytes(100), data, file_of([b"", b"x" * 9000]), end, later):
        items = scan(data + end + old)
        assert items == [*whole, Frame(len(data), END, b"")]


def test_a_frame_at_another_place_does_not_count():
    """A block that the disk wrote twice doubles nothing."""
    data = file_of([b"", b"a" * 100])
    assert payloads_in(scan(data + data[-100 - HEAD_BYTES :])) == [b"", b"a" * 100]


def test_unknown_kinds_and_flags_are_damage():
    """They have no meaning in this format, however right their checksum is."""
    data = file_of([b"", b"kind", b"after"])
    position = len(file_of([b""]))
    for kind, flags in ((4, 0), (ENTRY, 1)):
        summed = struct.pack("<HBBIQQ", 0x4D52, kind, flags, 4, checksum_of([b"kind"]), FIRST + position)
        forged = summed[:16] + struct.pack("<Q", xxh3_64_intdigest(summed, SALT))
        items = scan(data[:position] + forged + data[position + HEAD_BYTES :])
        assert payloads_in(items) == [b"", b"after"]


@pytest.mark.parametrize("shift", range(-HEAD_BYTES - 2, 3))
def test_frames_are_found_wherever_a_block_of_the_file_ends(shift):
    """Read in order, and found again behind damage whose end lies around the end of a block."""
    sizes = [BLOCK_BYTES - PREFIX_BYTES - 2 * HEAD_BYTES + shift, 3 * BLOCK_BYTES + 5, 11]
    payloads = [b"", *(bytes([number]) * size for number, size in enumerate(sizes, 1))]
    data = bytearray(file_of(payloads))
    assert payloads_in(scan(bytes(data))) == payloads
    data[PREFIX_BYTES + HEAD_BYTES] ^= 1
    assert payloads_in(scan(bytes(data))) == [b"", *payloads[2:]]


def test_a_file_is_read_in_bounded_blocks():
    """Also where damage has to be searched; a frame larger than a block is read alone."""
    data = bytearray(file_of([b"", *[bytes(1000)] * 5000, bytes(2 * BLOCK_BYTES)]))
    asked: list[int] = []
    scan(bytes(data), asked=asked)
    assert max(asked) == 2 * BLOCK_BYTES
    assert sum(length > BLOCK_BYTES for length in asked) == 1
    data[PREFIX_BYTES + HEAD_BYTES : 4 * BLOCK_BYTES] = bytes(4 * BLOCK_BYTES - PREFIX_BYTES - HEAD_BYTES)
    asked.clear()
    assert len(payloads_in(scan(bytes(data), asked=asked))) > 500
    assert sum(asked) < 3 * len(data)


def test_the_format_of_a_file_is_known_or_not():
    """0 stands for no prefix of any format; the number of a later format is read."""
    assert format_of(file_of()) == FORMAT
    assert format_of(prefix()[:-1]) == format_of(b"") == format_of(bytes(100)) == 0
    later = MAGIC + struct.pack("<I", FORMAT + 1)
    assert format_of(later + struct.pack("<I", zlib.crc32(later))) == FORMAT + 1
    assert format_of(later + bytes(4)) == 0
