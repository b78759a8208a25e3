"""A record as lines for a person: its fields, or what is wrong with it."""

import numpy as np
import pytest

from mrl.inspection.shown_records import record_lines, shown_text
from mrl.records.codec import encode, pack_array
from mrl.records.experience import TokenTrace
from tests.support.successes import success

BAD = "\x1b[2J\r\n\u202e\x00"


def outcome(*, completion=b"reverse: yah", prompt_id="p1", num_tokens=2):
    """A success with its trace."""
    trace = TokenTrace(
        byte_lengths=pack_array(np.arange(num_tokens), "i4"),
        logprobs=pack_array(np.full(num_tokens, -0.5), "f4"),
        special=pack_array(np.zeros(num_tokens), "u1"),
    )
    return success(prompt_id=prompt_id, step=3, completion=completion, trace=trace)


def test_a_record_is_shown_field_by_field():
    """With where it was found, and arrays in bytes as the numbers that they are."""
    first, verdict, *tree = record_lines(encode(outcome()), found="held by the daemon")
    assert first.endswith(" bytes, held by the daemon")
    assert verdict == "valid record: OutcomeRecord"
    for line in ("    'record_id': 'r1',", "    'completion': b'reverse: yah',", "        'step': 3"):
        assert line in tree
    at = tree.index("        'logprobs': [")
    assert tree[at + 1 : at + 3] == ["            -0.5,", "            -0.5"]


def test_long_fields_are_cut_and_say_so():
    """Texts, bytes and arrays."""
    lines = list(record_lines(encode(outcome(completion=b"x" * 5000, num_tokens=1000)), found="x"))
    [completion] = [line for line in lines if "'completion'" in line]
    assert completion.endswith("x'+4840,")
    assert sum(line.strip() == "... +968" for line in lines) == 3
    assert max(map(len, lines)) < 250


def test_a_record_that_is_not_valid_shows_what_is_wrong_and_its_head():
    """Also bytes that are no msgpack at all, and a nesting that no stack could bear."""
    body = encode(outcome()).replace(b"\xa4stop", b"\xa4sto\x1b")
    _, verdict, head = record_lines(body, found="x")
    assert verdict.startswith("invalid record: not a valid record: Invalid enum value")
    assert verdict.isprintable()
    assert head == body[:32].hex(" ") + " ..."
    assert list(record_lines(b"\xc1", found="x"))[-1] == "c1"
    assert len(list(record_lines(b"\x91" * 100_000, found="x"))) == 3


@pytest.mark.parametrize("record", [outcome(prompt_id="p" + BAD), outcome(completion=BAD.encode() + b"\xff")])
def test_nothing_reaches_the_terminal_that_it_would_act_upon(record):
    """Escapes, newlines, direction marks and broken UTF-8, in texts and bytes."""
    for line in [*record_lines(encode(record), found="x"), shown_text(BAD)]:
        assert line.isprintable()
