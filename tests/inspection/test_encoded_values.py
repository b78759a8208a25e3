"""Any bytes as lines: under limits, and never more than they can bear."""

import random
import tracemalloc

import msgpack
import pytest

from mrl.inspection.encoded_values import MAX_DEPTH, MAX_PASSED_OVER, MAX_VALUES, shown_text, value_lines


def lines(data):
    """All lines of these bytes."""
    return list(value_lines(data))


def test_a_tree_is_shown_with_its_names():
    """A line for each value, indented below what holds it."""
    value = {"text": "hi", "flag": True, "none": None, "share": 0.5, "list": [1, {"a": -2}], 7: b"yah"}
    assert lines(msgpack.packb(value)) == [
        "map of 6",
        '  text: "hi"',
        "  flag: True",
        "  none: None",
        "  share: 0.5",
        "  list: array of 2",
        "    [0] 1",
        "    [1] map of 1",
        "      a: -2",
        '  7: 3 bytes "yah"',
    ]


def test_arrays_in_bytes_are_shown_as_numbers():
    """Those whose meaning the records fix; of another length they are bytes."""
    value = {
        "byte_lengths": b"\x01\0\0\0\x02\0\0\0",
        "logprobs": b"\0\0\x80\xbf" * 9,
        "special": b"\0\x01",
        "token_ids": b"\xff",
    }
    assert lines(msgpack.packb(value))[1:] == [
        "  byte_lengths: 8 bytes, 2 int32 [1, 2]",
        "  logprobs: 36 bytes, 9 float32 [-1, -1, -1, -1, -1, -1, -1, -1, ...]",
        "  special: 2 bytes, 2 uint8 [0, 1]",
        "  token_ids: 1 bytes ff",
    ]


def test_nothing_reaches_the_terminal_that_it_would_act_upon():
    """Escapes, newlines, direction marks and broken UTF-8, in texts, names and bytes."""
    bad = "\x1b[2J\r\n\u202e\x00"
    data = msgpack.packb({bad: bad, "b": bad.encode(), "e": msgpack.ExtType(5, bad.encode())}) + b"\x1b"
    data += msgpack.packb(b"\xff\xfe")
    for line in [*lines(data), shown_text(bad)]:
        assert line.isprintable()
    assert '"\\x1b[2J\\r\\n\\u202e\\x00"' in lines(data)[1]
    broken = b"\x81\xa1k\xa2\xc3\x28"
    assert lines(broken)[1] == '  k: "\ufffd("'


def test_long_texts_bytes_and_lists_are_cut():
    """And say how long they are."""
    [_, text, raw, numbers, *_] = lines(msgpack.packb({"t": "x" * 5000, "b": b"\xff" * 5000, "n": [1] * 1000}))
    assert text.endswith('..." (5000 characters)')
    assert raw.startswith("  b: 5000 bytes ff ff")
    assert raw.endswith(" ...")
    assert (len(text) < 250, len(raw) < 250, numbers) == (True, True, "  n: array of 1000")
    assert lines(msgpack.packb([1] * 1000))[-1] == "  ... and 968 more"


@pytest.mark.parametrize(
    ("data", "last"),
    [
        (b"", "broken off at byte 0 of 0"),
        (b"\xc1", "broken off at byte 0 of 1: FormatError"),
        (b"\x92\x01", "broken off at byte 2 of 2"),
        (b"\xdd\xff\xff\xff\xff", "broken off at byte 5 of 5"),
        (b"\xdf\xff\xff\xff\xff\x01", "broken off"),
        (b"\xc6\xff\xff\xff\xffab", "broken off"),
        (b"\xc9\xff\xff\xff\xff\x05ab", "broken off"),
        (b"\xc7\x0c\xff" + b"\xff" * 12, "broken off"),
        (b"\x91" * 100_000, "broken off"),
        (b"\x81\xa1a" * 100_000, "broken off"),
        (b"\x01\x02\x03", "and 2 more bytes behind the value"),
    ],
)
def test_what_is_no_whole_value_says_where_it_ends(data, last):
    """Claims of four thousand million items, and a nesting that no stack could bear, included."""
    shown = lines(data)
    assert last in shown[-1]
    assert len(shown) < MAX_DEPTH + 10


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\x00\x7f\xff\xff" + b"\x80" * 0x7FFFFF,
        b"\xdf\x00\x3f\xff\xff" + b"\x01\x80" * 0x3FFFFF,
        (b"\xdd\x00\x00\x00\x21" + b"\xc0" * 32) * 200_000,
    ],
    ids=["array of empty maps", "map of empty maps", "arrays in arrays"],
)
def test_bombs_cost_neither_memory_nor_time(data):
    """Eight megabytes that would be hundreds of megabytes of objects."""
    tracemalloc.start()
    try:
        shown = lines(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(shown) <= MAX_VALUES + 2
    assert peak_bytes < 4 * len(data)
    assert "here it is enough" in shown[-1] or "broken off" in shown[-1]


def test_the_walk_ends_after_so_many_values():
    """Of wide maps as well as of long arrays."""
    assert f"more than {MAX_VALUES} values" in lines(msgpack.packb({n: n for n in range(MAX_VALUES + 5)}))[-1]
    assert f"more than {MAX_PASSED_OVER} values" in lines(msgpack.packb([0] * (MAX_PASSED_OVER + 100)))[-1]


@pytest.mark.parametrize("seed", range(4))
def test_garbage_never_raises(seed):
    """Random bytes, and records in which some bits were turned over."""
    rng = random.Random(seed)
    good = msgpack.packb(
        {"type": "outcome", "oldest": {"run_epoch": 0, "step": 3}, "completion": b"yah", "r": [1.5] * 9}
    )
    for _ in range(1500):
        damaged = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        for data in (bytes(damaged), rng.randbytes(rng.randrange(200)), good[: rng.randrange(len(good))]):
            assert all(line.isprintable() for line in value_lines(data))
