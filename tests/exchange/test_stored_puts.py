"""What a client puts again under another number is known by the ids, as far back as it may have been unanswered."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged_core import LoggedCore, packed_message
from msgspec.structs import replace
from xxhash import xxh3_64_digest

from mrl.exchange import stored_puts
from mrl.exchange.stored_puts import StoredPuts
from mrl.records.codec import decode
from mrl.records.exchange_messages import Batch, Hello, Stream
from mrl.records.experience import pack_decoder

LEARNER, WORKER = b"learner/llama", b"worker/qwen/0"


def hashes(*ids):
    """As a pack carries them."""
    return b"".join(xxh3_64_digest(str(one).encode()) for one in ids)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "hello", "restart"]),
        st.sampled_from(["a", "b"]),
        st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(actions=ACTIONS)
def test_doubles_are_what_an_earlier_life_stored_within_the_window(actions):
    """Compared with lists that remember everything: all that a client put in its last puts before it came back."""
    stored, seq = StoredPuts(), 0
    past = {"a": [], "b": []}  # all puts that were stored: (life, ids)
    life, since = {"a": 0, "b": 0}, {"a": 0, "b": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_puts, "WINDOW_PUTS", 4)
        for action, client, ids in actions:
            match action:
                case "hello":
                    stored.begin_life(client)
                    life[client] += 1
                    since[client] = len(past[client])
                case "restart":
                    again = StoredPuts()
                    again.restore(stored.counts(), stored.windows())
                    stored = again
                    for one in ("a", "b"):
                        stored.begin_life(one)
                        life[one] += 1
                        since[one] = len(past[one])
                case "put":
                    earlier = past[client][max(0, since[client] - 4) : since[client]]
                    is_over = len(past[client]) - since[client] > 4 or life[client] == 0
                    expected = [not is_over and any(one in put for put in earlier) for one in ids]
                    found = stored.doubles(client, hashes(*ids))
                    assert (found is None and not any(expected)) or list(found) == expected
                    new = [one for one, is_double in zip(ids, expected, strict=True) if not is_double]
                    if new:
                        seq += 1
                        stored.note(client, seq, len(new), 10 * len(new), hashes(*new))
                        past[client].append(new)


def test_the_window_is_bounded_in_bytes_and_in_all(monkeypatch):
    """What is older than all that a client may have unanswered is forgotten; so is, of all, what came first."""
    monkeypatch.setattr(stored_puts, "WINDOW_BYTES", 100)
    monkeypatch.setattr(stored_puts, "MAX_IDS", 5)
    stored = StoredPuts()
    for seq in range(3):
        stored.note("a", seq, 1, 50, hashes(seq))
    assert list(stored.windows()) == [("a", [(50, hashes(1)), (50, hashes(2))])]
    stored.note("b", 1, 4, 40, hashes(3, 4, 5, 6))
    assert list(stored.windows()) == [("a", [(50, hashes(2))]), ("b", [(40, hashes(3, 4, 5, 6))])]
    stored.note("b", 2, 1, 10, hashes(7))
    assert [client for client, _ in stored.windows()] == ["b"]
    assert stored.num_stored("a", 2) == 1


def test_what_is_compared_counts_too(monkeypatch):
    """Nobody fills the memory by coming back under one name after the other: who was silent longest is forgotten."""
    monkeypatch.setattr(stored_puts, "MAX_IDS", 6)
    monkeypatch.setattr(stored_puts, "WINDOW_PUTS", 2)
    stored = StoredPuts()
    for client in ("a", "b"):
        stored.note(client, 1, 2, 20, hashes(1, 2))
        stored.begin_life(client)
        assert stored.doubles(client, hashes(2, 3)) == [True, False]
    for seq in (2, 3):  # its window holds no ids any more, and what it is compared with is still there
        stored.note("b", seq, 1, 10, b"")
    assert stored.doubles("a", hashes(2)) is None
    assert stored.doubles("b", hashes(2)) == [True]
    assert list(stored.windows()) == [("a", [(20, hashes(1, 2))]), ("b", [(10, b""), (10, b"")])]
    stored.note("c", 1, 3, 30, hashes(4, 5, 6))
    assert [client for client, _ in stored.windows()] == ["b", "c"]
    assert stored.doubles("b", hashes(2)) == [True]


@pytest.mark.parametrize(("num_bytes", "window"), [(1, {"WINDOW_PUTS": 2}), (50, {"WINDOW_BYTES": 100})])
def test_nothing_is_compared_when_the_first_window_of_a_life_is_over(monkeypatch, num_bytes, window):
    """What was unanswered at its death would have come by then."""
    for name, value in window.items():
        monkeypatch.setattr(stored_puts, name, value)
    stored = StoredPuts()
    stored.note("a", 1, 1, num_bytes, hashes("old"))
    stored.begin_life("a")
    for seq in (2, 3):
        assert stored.doubles("a", hashes("new", "old")) == [False, True]
        stored.note("a", seq, 1, num_bytes, hashes(seq))
    assert stored.doubles("a", hashes("old")) == [True]
    stored.note("a", 4, 1, num_bytes, hashes(4))
    assert stored.doubles("a", hashes("old")) is None


def make_core(**options):
    """A core that holds packs, a reader, and a producer."""
    core = LoggedCore(**({"budget_bytes": 10**8, "asked": False} | options))
    core.handle(LEARNER, Hello(client="l", policy="llama"), 0.0)
    hello(core)
    return core


def hello(core):
    """The producer is started (again)."""
    core.handle(WORKER, Hello(client=WORKER.decode(), policy="qwen"), 0.0)


def put(core, *records, message=None):
    """(stored, refused) as the producer is told; None when it is told nothing."""
    out = core.handle(WORKER, message or packed_message(*records), 0.0)
    return next(((said.stored, said.refused) for who, said in out if who == WORKER), None)


def read(core):
    """(number, count) of all that a new reader gets."""
    out = core.handle(LEARNER, Stream(client="l", stream="s", kinds=["outcome"]), 0.0)
    return [(one.number, one.count) for _, message in out if isinstance(message, Batch) for one in message.parcels]


def restored(core, *, from_snapshot=False):
    """The next daemon, whose log has all entries, or none but its snapshot."""
    again = make_core()
    again.memory.restore(*(core.memory.snapshot(), []) if from_snapshot else (None, core.logged()))
    hello(again)
    return again


@pytest.mark.parametrize("after", ["a death", "a death and a restart", "a death and a released log"])
def test_what_was_stored_before_a_death_is_stored_once(outcome, after):
    """In other packs, with something new between: it is cut out, counted, and the rest is numbered through."""
    records = [outcome(f"r{n}", completion=bytes(100 + n)) for n in range(8)]
    core = make_core()
    put(core, *records[:3], outcome("other", step=1))
    put(core, *records[3:5])
    if after == "a death":
        hello(core)
    else:
        core = restored(core, from_snapshot=after.endswith("log"))
    assert put(core, outcome("other", step=1)) == (0, {"duplicate": 1})
    assert put(core, records[2], records[7], records[4], records[5]) == (2, {"duplicate": 2})
    assert put(core, records[6], outcome("more", step=1)) == (2, {})
    assert put(core, records[5]) == (1, {})  # said twice in one life: its own affair
    found = read(core)
    assert found[-4:] == [(7, 2), (9, 1), (10, 1), (11, 1)]
    body = next(one.body for one in core.shelf.entries() if one.number == 7)
    assert [one.record_id for one in decode(body, pack_decoder)] == ["r7", "r5"]


def test_a_name_without_a_past_is_compared_with_nothing(outcome):
    """Nor is another client of the same policy."""
    core = make_core()
    put(core, outcome("r1"))
    other = b"worker/qwen/1"
    core.handle(other, Hello(client="x", policy="qwen"), 0.0)
    out = core.handle(other, packed_message(outcome("r1")), 0.0)
    assert [said.stored for who, said in out if who == other] == [1]


def test_a_hello_in_the_name_of_another_brings_no_past_with_it(outcome):
    """The name is that of the key: a client that says another one neither loses nor spoils records."""
    core = make_core()
    put(core, outcome("r1"))
    other = b"worker/qwen/1"
    core.handle(other, Hello(client=WORKER.decode(), policy="qwen"), 0.0)
    out = core.handle(other, packed_message(outcome("r1")), 0.0)
    assert [said.stored for who, said in out if who == other] == [1]


def test_what_is_on_its_way_to_the_log_is_waited_for(outcome):
    """Nothing is answered until it is known whether the log has it; what the log refused is new."""
    core = make_core(is_slow=True)
    put(core, outcome("r1"))
    put(core, outcome("r2"))
    hello(core)
    again = packed_message(outcome("r1"), outcome("r2"), outcome("r3"))
    assert put(core, message=again) is None
    (first, _), (second, _) = core.posted
    core.posted.clear()
    core.stored(first, 1, "", 0.0)
    assert put(core, message=again) is None
    core.stored(second, 2, "disk_full", 0.0)
    assert put(core, message=again) is None
    [(ticket, _)] = core.posted
    [(_, ack), *_] = core.stored(ticket, 3, "", 0.0)
    assert (ack.stored, ack.refused) == (2, {"duplicate": 1})


def test_a_client_that_sends_no_hashes_is_served_as_before(outcome):
    """Its records cannot be told apart, before or after its death."""
    core = make_core()
    message = packed_message(outcome("r1"))
    plain = replace(message, packs=[replace(pack, id_hashes=b"") for pack in message.packs])
    assert put(core, message=plain) == (1, {})
    hello(core)
    assert put(core, message=replace(plain, seq=1)) == (1, {})
    assert put(core, outcome("r1")) == (1, {})


def test_a_pack_that_cannot_be_cut_is_refused_whole(outcome):
    """It says that it holds something known, and is no array, or one of another length."""
    core = make_core()
    put(core, outcome("r1"))
    hello(core)
    message = packed_message(outcome("r1"), outcome("r2"))
    [pack] = message.packs
    longer = packed_message(outcome("r1"), outcome("r2"), outcome("r3")).packs[0]
    for seq, records in enumerate((b"\xc1" * 9, bytes(longer.records)), 1):
        bad = replace(pack, records=type(pack.records)(records), num_bytes=len(records))
        assert put(core, message=replace(message, packs=[bad], seq=seq)) == (0, {"invalid": 2})
