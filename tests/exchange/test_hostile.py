"""What no client of mrl would say: the daemon answers or drops it, in no time, and holds no more for it."""

import gc
import struct
import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.records.codec import MAX_MESSAGE_BYTES
from tests.support.exchange_conversations import conversations, mutated
from tests.support.exchange_stage import BUDGET_BYTES, CLIENTS, MAX_PIECES, Stage, joined, pieces, play

CORPUS = Path(__file__).parent / "corpus"
MIB = 1024 * 1024
ARRAY_32, MAP_32, BIN_32 = b"\xdd", b"\xdf", b"\xc6"
MAX_S, MAX_BYTES = 0.5, 4 * MIB
"""For one message of a megabyte."""
ONE_OF_EACH = sorted(
    {body for data in conversations().values() for _, body in pieces(data)}, key=lambda body: (len(body), body)
)
TAGS = [msgspec.msgpack.decode(body)["type"] for body in ONE_OF_EACH]


def packed(**fields):
    """A message whose fields may be anything."""
    return msgspec.msgpack.encode(fields)


def put_with(record):
    """A Put of one record, which is these bytes."""
    return packed(type="put", client="w", seq=1, records=[msgspec.Raw(record)])


ASK = packed(type="fetch", client="l", policy="llama", prompt_ids=["p1"], limit=4, max_age_versions=None, watch=False)
DONE = packed(type="done", client="w", requests=[])[:-1]
"""Up to where their lists begin."""


@pytest.fixture
def stage():
    """A core that knows its clients."""
    return Stage()


def cost_of(stage, body):
    """(CPU seconds, bytes at the worst moment) that one message of a client takes, in this core and in another one."""
    begin_s = time.thread_time()
    stage.say(*CLIENTS[0], body)
    seconds = time.thread_time() - begin_s
    other = Stage()
    gc.collect()
    tracemalloc.start()
    try:
        other.say(*CLIENTS[0], body)
        return seconds, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_every_sort_of_message_is_among_the_seeds():
    """What is not cannot be spoiled below."""
    assert set(TAGS) >= {
        "hello", "ping", "put", "announce", "fetch", "unwatch", "subscribe", "done", "barrier", "stat_request",
    }  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(client=st.integers(0, len(CLIENTS) - 1), body=st.binary(max_size=512))
def test_random_bytes_are_dropped_and_counted(client, body):
    """Nobody is answered."""
    stage = Stage()

    assert stage.say(*CLIENTS[client], body) == []
    assert stage.core.malformed["record"] == 1


@pytest.mark.parametrize("body", ONE_OF_EACH, ids=TAGS)
def test_a_message_cut_short_is_dropped_wherever_it_is_cut(stage, body):
    """At each of its bytes."""
    lengths = range(len(body)) if len(body) < 2000 else range(0, len(body), 17)
    for length in lengths:
        assert stage.say(*CLIENTS[0], body[:length]) == []
    assert stage.core.malformed["record"] == len(lengths)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(conversations())), rng=st.randoms(use_true_random=False), turns=st.integers(1, 12))
def test_spoiled_conversations_break_nothing(name, rng, turns):
    """Values of other types and sizes, messages doubled, dropped, cut, and said by others; then a restart."""
    data = conversations()[name]
    for _ in range(turns):
        data = mutated(data, rng)

    play(data)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=2000))
def test_any_bytes_can_be_played(data):
    """Whatever its pieces are."""
    play(data)
    assert pieces(joined(pieces(data))) == pieces(data)


@pytest.mark.parametrize(
    "opener", [b"\x91", b"\x81\xa1x", ARRAY_32 + b"\0\0\0\1"], ids=["arrays", "maps", "long arrays"]
)
@pytest.mark.parametrize("depth", [100, 5_000, 200_000])
@pytest.mark.parametrize("wrap", [bytes, put_with], ids=["bare", "in a Put"])
def test_deep_nesting_is_refused(stage, opener, depth, wrap):
    """Where the daemon passes bytes on unread, as soon as somebody asks for them; it is still there and answers."""
    stage.say(*CLIENTS[0], wrap(opener * depth + b"\xc0"))
    stage.say(*CLIENTS[2], ASK)

    assert len(stage.core.index) == 0
    assert len(stage.say(*CLIENTS[0], packed(type="ping", client="w"))) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("marker", [ARRAY_32, MAP_32, BIN_32], ids=["array", "map", "bytes"])
@pytest.mark.parametrize("before", [b"", DONE], ids=["bare", "in a Done"])
def test_a_count_that_is_not_true_costs_nothing(stage, marker, before):
    """Four thousand million items are announced and do not come."""
    seconds, num_bytes = cost_of(stage, before + marker + b"\xff\xff\xff\xff")

    assert stage.core.malformed["record"] == 1
    assert seconds < MAX_S
    assert num_bytes < MAX_BYTES


A_MILLION_MAPS = ARRAY_32 + struct.pack(">I", MIB) + b"\x80" * MIB
AMPLIFIERS = {
    "empty maps": b"\x80" * MIB,
    "empty arrays": b"\x90" * MIB,
    "a Done of empty maps": DONE + A_MILLION_MAPS,
    "a Put of a million records": packed(type="put", client="w", seq=1, records=[{}] * MIB),
    "a record that is a list": put_with(A_MILLION_MAPS),
    "an unknown field": packed(type="ping", client="w", more=[{}] * MIB),
    "a Fetch of a million ids": packed(
        type="fetch", client="w", policy="qwen", prompt_ids=["p"] * MIB, limit=1, max_age_versions=None, watch=True
    ),
    "as many ids as may be": packed(
        type="fetch", client="w", policy="qwen", prompt_ids=[f"{n:0200}" for n in range(4096)], limit=64,
        max_age_versions=None, watch=True,
    ),
    "a record of empty maps": put_with(
        packed(type="outcome", record_id="r", source="qwen", more=[{}] * MIB)
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", AMPLIFIERS)
def test_small_things_in_great_number_cost_little(stage, name):
    """A megabyte becomes no more than four, within half a second."""
    seconds, num_bytes = cost_of(stage, AMPLIFIERS[name])

    assert seconds < MAX_S
    assert num_bytes < MAX_BYTES
    assert stage.core.index.used_bytes <= BUDGET_BYTES


def test_a_message_that_is_too_long_is_not_even_read(stage):
    """The socket refuses it first; the core does as well, although all else about it is right."""
    seconds, num_bytes = cost_of(
        stage, put_with(b"\xc0") + b"\x91" + BIN_32 + struct.pack(">I", MAX_MESSAGE_BYTES) + bytes(MAX_MESSAGE_BYTES)
    )

    assert stage.core.malformed["record"] == 1
    assert seconds < MAX_S
    assert num_bytes < MIB


def test_the_stage_sees_what_it_is_for(monkeypatch, stage):
    """An answer to somebody who is no client, and an index that holds too much."""
    with pytest.raises(AssertionError, match="an answer to"):
        stage.say(b"nobody", CLIENTS[0][1], packed(type="ping", client="w"))
    monkeypatch.setattr(stage.core.index, "used_bytes", BUDGET_BYTES + 1)
    with pytest.raises(AssertionError, match="are held"):
        stage.say(*CLIENTS[0], b"")


def test_pieces_are_bounded():
    """Whatever the input is, one play is short."""
    assert len(pieces(bytes(100_000))) == MAX_PIECES


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*")), ids=lambda path: path.name[:12])
def test_the_corpus_breaks_nothing(path):
    """Inputs that once reached code which no other did."""
    play(path.read_bytes())
