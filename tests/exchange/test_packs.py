"""Records that nobody asks for one by one stay in packs; asking makes no difference to what is found."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged_core import LoggedCore, batch_records, packed_message, put_message, records_of

from mrl.records.codec import encode
from mrl.records.exchange_messages import Announce, Batch, Deliver, Fetch, Hello, Stream
from mrl.records.version import Version

LEARNER, WORKER = b"learner/llama", b"worker/qwen/0"


def make_core(**options):
    """A core that nobody has asked for single records, and that knows a learner of llama and a worker of qwen."""
    core = LoggedCore(**({"budget_bytes": 10**8, "asked": False} | options))
    core.handle(LEARNER, Hello(client="l", policy="llama"), 0.0)
    core.handle(WORKER, Hello(client="w", policy="qwen"), 0.0)
    return core


def put(core, *records):
    """Records as a client packs them; returns the acknowledgement and what else is sent."""
    (_, ack), *others = core.handle(WORKER, packed_message(*records), 0.0)
    return ack, others


def fetch(core, *prompt_ids, kinds=("outcome",), limit=4):
    """Ids of what llama gets."""
    asked = Fetch(
        client="l", policy="llama", prompt_ids=list(prompt_ids), kinds=list(kinds), limit=limit,
        max_age_versions=None, watch=False,
    )  # fmt: skip
    return [r.record_id for _, m in core.handle(LEARNER, asked, 0.0) if isinstance(m, Deliver) for r in records_of(m)]


def read(core, after=0):
    """(number of a parcel, ids in it) of what a reader is sent."""
    out = core.handle(LEARNER, Stream(client="l", stream="s", kinds=["outcome"], after=after), 0.0)
    parcels = [parcel for _, message in out if isinstance(message, Batch) for parcel in message.parcels]
    ids = [r.record_id for _, message in out if isinstance(message, Batch) for r in batch_records(message)]
    return [(parcel.number, parcel.count) for parcel in parcels], ids


def restored(core, **options):
    """The next daemon."""
    again = make_core(**options)
    again.memory.restore(None, core.logged())
    again.log = list(core.log)
    return again


def test_a_pack_is_held_and_read_as_one(outcome):
    """One entry, numbered through; a reader that stands inside it gets it again."""
    core = make_core()
    ack, _ = put(core, *[outcome(f"r{n}", prompt_id=f"p{n}") for n in range(5)], outcome("late", step=1))
    assert (ack.stored, len(core.shelf), len(list(core.shelf.entries()))) == (6, 6, 2)
    assert read(core) == ([(1, 5), (6, 1)], ["r0", "r1", "r2", "r3", "r4", "late"])
    assert read(restored(core), after=3)[0] == [(1, 5), (6, 1)]
    assert read(restored(core), after=5)[0] == [(6, 1)]


def test_who_asks_finds_what_lay_in_packs(outcome):
    """Within the quota of the prompt, newest first, and in the same places of the order."""
    core = make_core()
    put(core, *[outcome(f"r{n}", prompt_id=f"p{n % 2}") for n in range(12)])
    assert fetch(core, "p1") == ["r11", "r9", "r7", "r5"]
    assert [core.shelf.get(f"r{n}").number for n in (4, 5, 11)] == [5, 6, 12]
    assert core.shelf.policies["qwen"].evicted == {"surpassed": 4}
    put(core, outcome("new", prompt_id="p1"))
    assert fetch(core, "p1") == ["new", "r11", "r9", "r7"]
    assert len(core.shelf) == 8


def test_only_the_type_that_was_asked_for_is_unpacked(outcome, value):
    """Streams of another type go on in packs."""
    core = make_core()
    put(core, *[outcome(f"r{n}") for n in range(3)], *[value(f"v{n}") for n in range(3)])
    assert fetch(core, "p1", kinds=("value",)) == ["v2"]
    assert read(core)[0] == [(1, 3)]


def test_a_pack_under_way_is_unpacked_when_it_arrives(outcome):
    """Somebody asked while the log was writing."""
    core = make_core(is_slow=True)
    core.handle(WORKER, packed_message(outcome("r1"), outcome("r2", prompt_id="p2")), 0.0)
    assert fetch(core, "p1") == []
    ticket, _ = core.posted[0]
    core.stored(ticket, 7, "", 0.0)
    assert (fetch(core, "p1"), core.shelf.get("r2").number, core.shelf.get("r2").offset) == (["r1"], 2, 7)


@pytest.mark.parametrize("asked_first", [True, False])
def test_the_log_tells_what_was_asked_for(outcome, asked_first):
    """After a restart records are unpacked where they were, also those that were written anew since."""
    core = make_core()
    if asked_first:
        fetch(core, "p1")
    put(core, *[outcome(f"r{n}", prompt_id=f"p{n}") for n in range(4)])
    fetch(core, "p1")
    assert not core.move_up(100)
    core.handle(LEARNER, Hello(client="l", policy="llama"), 0.0)
    again = restored(core)
    assert "outcome" in again.shelf.indexed
    assert [(e.number, e.count, e.record_id, e.offset) for e in again.shelf.entries()] == [
        (e.number, e.count, e.record_id, e.offset) for e in core.shelf.entries()
    ]
    assert read(again)[1] == ["r0", "r1", "r2", "r3"]


def test_a_moved_pack_is_the_same_pack(outcome):
    """It is in the same place of the order after a restart, and in a new one on the log."""
    core = make_core()
    for number in range(3):
        put(core, outcome(f"r{number}"), outcome(f"s{number}"))
    assert not core.move_up(2)
    core.handle(LEARNER, Hello(client="l", policy="llama"), 0.0)
    again = restored(core)
    for one in (core, again):
        assert [(entry.number, entry.count, entry.offset) for entry in one.shelf.entries()] == [
            (1, 2, 3), (3, 2, 3), (5, 2, 2),
        ]  # fmt: skip
    assert read(again)[1] == ["r0", "s0", "r1", "s1", "r2", "s2"]


def test_records_of_a_pack_age_and_go_together(outcome):
    """Counted one by one."""
    core = make_core(max_age_versions=5, budget_bytes=60_000)
    put(core, *[outcome(f"r{n}") for n in range(3)])
    core.handle(WORKER, Announce(client="w", policy="qwen", version=Version(0, 6)), 0.0)
    assert core.shelf.policies["qwen"].evicted == {"stale": 3}
    assert put(core, outcome("old"), outcome("old too"))[0].refused == {"stale": 2}
    for number in range(3):
        put(core, *[outcome(f"f{number}.{n}", step=6, completion=bytes(5000)) for n in range(5)])
    assert core.shelf.policies["qwen"].evicted == {"stale": 3, "full": 5}
    assert core.shelf.used_bytes <= 60_000


def test_what_a_pack_says_of_itself_has_to_hold(outcome):
    """Its length at once; what is in it when it is unpacked, and no record of another policy ever."""
    core = make_core()
    message = packed_message(outcome("r1"))
    [pack] = message.packs
    short = msgspec.structs.replace(message, packs=[msgspec.structs.replace(pack, num_bytes=pack.num_bytes - 1)])
    assert core.handle(WORKER, short, 0.0)[0][1].refused == {"invalid": 1}
    put(core, outcome("mine"), outcome("theirs", source="llama"))
    put(core, outcome("mine", completion=b"again"))
    assert fetch(core, "p1") == ["mine"]
    assert (len(core.shelf), core.shelf.used_bytes) == (1, core.shelf.get("mine").held_bytes)
    lying = packed_message(outcome("r2"))
    for seq, id_hashes, num_invalid in ((77, lying.packs[0].id_hashes, 3), (78, b"", 2)):
        many = msgspec.structs.replace(lying.packs[0], count=3, id_hashes=id_hashes)
        message = msgspec.structs.replace(lying, packs=[many], seq=seq)
        assert core.handle(WORKER, message, 0.0)[0][1].refused == {"invalid": num_invalid}


def test_garbage_in_a_pack_is_gone_when_somebody_asks(outcome):
    """And leaves no bytes behind."""
    core = make_core()
    message = packed_message(outcome())
    bad = [msgspec.structs.replace(message.packs[0], records=msgspec.Raw(b"\xc1" * 9), num_bytes=9)]
    assert core.handle(WORKER, msgspec.structs.replace(message, packs=bad), 0.0) != []
    assert len(core.shelf) == 1
    assert fetch(core, "p1") == []
    assert (len(core.shelf), core.shelf.used_bytes, list(core.shelf.entries())) == (0, 0, [])


def test_a_put_is_the_same_put_for_ever(outcome):
    """Repeated to this daemon or the next, it is answered as it was, and stored once."""
    core = make_core()
    message = packed_message(outcome("r1"), outcome("r2"), seq=5)
    for one in (core, core, restored(core)):
        [(_, ack)] = one.handle(WORKER, message, 0.0)
        assert (ack.seq, ack.stored, ack.refused, len(one.shelf)) == (5, 2, {}, 2)
    again = make_core()
    again.memory.restore(core.memory.snapshot(), [])
    [(_, ack)] = again.handle(WORKER, message, 0.0)
    assert (ack.stored, len(again.shelf)) == (2, 0)
    other = b"worker/qwen/1"
    core.handle(other, Hello(client="x", policy="qwen"), 0.0)
    core.handle(other, message, 0.0)
    assert len(core.shelf) == 4


def test_a_small_pack_does_not_keep_a_large_message(outcome):
    """What is counted is what is held."""
    core = make_core()
    put(core, outcome("large", completion=bytes(200_000)), outcome("small", step=1))
    large, small = core.shelf.entries()
    assert (type(large.body), type(small.body)) == (memoryview, bytes)
    assert len(small.body) < 1000


@settings(deadline=None, max_examples=60)
@given(
    puts=st.lists(st.lists(st.tuples(st.sampled_from("pq"), st.integers(0, 2)), min_size=1, max_size=6), max_size=8),
    asked_at=st.integers(0, 8),
    restart_at=st.integers(0, 8),
)
def test_it_does_not_matter_when_somebody_begins_to_ask(outcome, puts, asked_at, restart_at):
    """Afterwards everything is as if all had been asked for from the start, each record put alone."""
    packs, singles, count = make_core(), make_core(asked=True), 0
    for place, tags in enumerate(puts):
        if place == asked_at:
            fetch(packs, "p")
        if place == restart_at:
            packs = restored(packs)
        records = []
        for prompt_id, step in tags:
            count += 1
            records.append(outcome(f"r{count}", prompt_id=prompt_id, step=step))
        put(packs, *records)
        for record in records:
            singles.handle(WORKER, put_message(record), 0.0)
    assert fetch(packs, "p", "q", limit=64) == fetch(singles, "p", "q", limit=64)
    assert [(e.number, e.record_id) for e in packs.shelf.entries()] == [
        (e.number, e.record_id) for e in singles.shelf.entries()
    ]
    assert (packs.shelf.used_bytes, len(packs.shelf)) == (singles.shelf.used_bytes, len(singles.shelf))
    assert encode(packs.stat(0.0).shelves[0]) != b""
