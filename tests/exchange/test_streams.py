"""Streams: every record that is wanted comes once, in order, whatever is lost and whoever is restarted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged_core import LoggedCore, batch_records, packed_message, put_message
from msgspec.structs import replace

from mrl.exchange import streams
from mrl.exchange.journal import read
from mrl.exchange.parking import MAX_PARKED_BYTES, Parking
from mrl.exchange.reader import Reader
from mrl.exchange.shared_files import SharedFiles
from mrl.exchange.streams import (
    LAPSE_S,
    MAX_BATCH_ENTRIES,
    MAX_STREAMS,
    MAX_STREAMS_PER_KEY,
    MAX_STREAMS_PER_POLICY,
    RESEND_S,
    TOTAL_WINDOW_BYTES,
    WINDOW_BYTES,
)
from mrl.records.codec import encode
from mrl.records.exchange_messages import (
    Announce,
    Batch,
    Commit,
    Hello,
    Put,
    PutAck,
    StatRequest,
    Stream,
    Took,
    Welcome,
)
from mrl.records.version import Version

LEARNER, WORKER = b"learner/llama", b"worker/qwen/0"


def make_core(**options):
    """A core that knows a learner of llama and a worker of qwen."""
    core = LoggedCore(**({"budget_bytes": 10**9} | options))
    core.handle(LEARNER, Hello(client="l", policy="llama"), 0.0)
    core.handle(WORKER, Hello(client="w", policy="qwen"), 0.0)
    return core


def wish(**options):
    """A Stream message."""
    return Stream(**({"client": "l", "stream": "s", "kinds": ["outcome"]} | options))


def open_stream(core, now_s=0.0, client=LEARNER, **options):
    """Returns the batches that come at once."""
    return batches(core.handle(client, wish(**options), now_s))


def put(core, *records, client=WORKER, now_s=0.0):
    """Returns the batches that come at once."""
    return batches(core.handle(client, put_message(*records), now_s))


def took(core, batch, now_s=0.0):
    """Returns the batches that come at once."""
    message = Took(client="l", stream=batch.stream, upto=numbers_of(batch)[-1])
    return batches(core.handle(LEARNER, message, now_s))


def batches(out):
    """The stream messages among those sent."""
    return [message for _, message in out if isinstance(message, Batch)]


def ids(sent):
    """Record ids in the order in which they were sent."""
    return [record.record_id for batch in sent for record in batch_records(batch)]


def numbers_of(batch):
    """Of its records."""
    return [number for parcel in batch.parcels for number in range(parcel.number, parcel.number + parcel.count)]


def ages_of(batch):
    """Of its records."""
    return [parcel.age_versions for parcel in batch.parcels for _ in range(parcel.count)]


def streams_of(core):
    """The daemon's account of all streams."""
    [(_, stat)] = core.handle(b"x", StatRequest(client="x"), 0.0)
    return stat.streams


def state(core):
    """The daemon's account of the only stream."""
    [(_, stat)] = core.handle(b"x", StatRequest(client="x"), 0.0)
    [only] = stat.streams
    return only


def test_what_is_there_and_what_comes(outcome):
    """In the order of arrival, with ages, and not one's own."""
    core = make_core()
    core.handle(LEARNER, put_message(outcome("own", source="llama")), 0.0)
    put(core, outcome("r1", step=2), outcome("r2", step=1))
    core.handle(WORKER, Announce(client="w", policy="qwen", version=Version(0, 3)), 0.0)
    [first] = open_stream(core)
    assert (ids([first]), ages_of(first), first.previous) == (["r1", "r2"], [1, 2], 0)
    [second] = put(core, outcome("r3", step=3))
    assert (ids([second]), second.previous) == (["r3"], numbers_of(first)[-1])


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, ["r1", "g1"]),
        ({"kinds": ["outcome", "value"]}, ["r1", "v1", "g1"]),
        ({"sources": ["gemma"]}, ["g1"]),
        ({"tasks": ["other"]}, []),
        ({"tasks": ["t", "other"], "sources": ["qwen", "gemma"]}, ["r1", "g1"]),
        ({"max_age_versions": 0}, ["g1"]),
    ],
)
def test_a_stream_is_of_some_types_sources_tasks_and_ages(outcome, value, limits, expected):
    """What it is not of is passed over."""
    core = make_core()
    core.handle(b"gemma", Hello(client="g", policy="gemma"), 0.0)
    put(core, outcome("r1"), value("v1"))
    put(core, outcome("g1", source="gemma"), client=b"gemma")
    core.handle(WORKER, Announce(client="w", policy="qwen", version=Version(0, 1)), 0.0)
    assert ids(open_stream(core, **limits)) == expected


def test_a_stream_has_a_window_and_batches_have_bounds(outcome):
    """Nothing beyond it goes until something was taken, and then the rest does."""
    core = make_core()
    records = [outcome(f"r{n}", prompt_id=f"p{n}", completion=bytes(100_000)) for n in range(100)]
    for record in records:
        put(core, record)
    sent = open_stream(core)
    came, unread = [], list(sent)
    while unread:
        assert sum(len(encode(batch)) for batch in unread) < WINDOW_BYTES + streams.MAX_BATCH_BYTES + 10_000
        batch = unread.pop(0)
        assert len(encode(batch)) < streams.MAX_BATCH_BYTES + 10_000
        came += ids([batch])
        unread += took(core, batch)
    assert came == [record.record_id for record in records]


def test_small_records_come_in_large_batches(outcome):
    """Up to 1024 at once."""
    core = make_core()
    for start in range(0, 3000, 500):
        put(core, *(outcome(f"r{start + n}", prompt_id=f"p{start + n}", completion=b"") for n in range(500)))
    assert len(ids(open_stream(core)[:1])) <= MAX_BATCH_ENTRIES
    assert len(open_stream(core, stream="again")) <= 5


def test_what_is_not_taken_is_sent_again_from_there(outcome):
    """After a while, and only what was not taken."""
    core = make_core()
    open_stream(core)
    [first] = put(core, outcome("r1"))
    [_] = put(core, outcome("r2", prompt_id="p2"))
    took(core, first, now_s=1.0)
    open_stream(core, now_s=3.0, after=numbers_of(first)[-1])
    assert batches(core.tick(RESEND_S + 0.9)) == []
    assert ids(batches(core.tick(RESEND_S + 1.0))) == ["r2"]


def test_a_reader_that_does_not_renew_gets_nothing(outcome):
    """It may be dead; it goes on where it stood."""
    core = make_core()
    open_stream(core)
    assert put(core, outcome("r1"), now_s=LAPSE_S + 0.1) == []
    assert ids(open_stream(core, now_s=10.0)) == ["r1"]


def test_the_last_to_open_a_stream_reads_it(outcome):
    """A policy has one reader per stream; each stream stands for itself."""
    core = make_core()
    core.handle(b"second", Hello(client="s", policy="llama"), 0.0)
    put(core, outcome("r1"))
    assert ids(open_stream(core)) == ["r1"]
    assert ids(open_stream(core, client=b"second")) == ["r1"]
    assert ids(open_stream(core, stream="other")) == ["r1"]
    out = core.handle(WORKER, put_message(outcome("r2", prompt_id="p2")), 0.0)
    assert sorted((client, message.stream) for client, message in out if isinstance(message, Batch)) == [
        (LEARNER, "other"),
        (b"second", "s"),
    ]


def test_a_learner_that_went_back_reads_again_what_follows_its_checkpoint(outcome):
    """It names the number that lies in the checkpoint."""
    core = make_core()
    open_stream(core)
    [first] = put(core, outcome("r1"))
    [second] = put(core, outcome("r2", prompt_id="p2"))
    took(core, second)
    assert ids(open_stream(core, after=numbers_of(first)[-1])) == ["r2"]


def test_a_wish_that_comes_late_holds_nothing_up(outcome):
    """After a partition an old link may still carry what the reader said before, and the daemon goes back for it."""
    core, reader = make_core(), reader_of(wish())
    link = batches(core.handle(LEARNER, reader.wish, 0.0))
    early = reader.wish
    for n in range(100):  # many times the window
        link += put(core, outcome(f"r{n}", prompt_id=f"p{n}", completion=bytes(100_000)))
    while link:
        reader.take(link.pop(0))
        link += took_upto(core, reader, 0.0)
    link = batches(core.handle(LEARNER, early, 0.0))
    assert ids(link)[0] == "r0"
    link += put(core, outcome("new", prompt_id="new"))
    came = []
    for now_s in range(5):
        link += batches(core.handle(LEARNER, reader.wish, now_s)) + batches(core.tick(now_s))
        while link:
            came += [item.record.record_id for item in (reader.take(link.pop(0)) or ([], 0))[0]]
            link += took_upto(core, reader, now_s)
    assert came == ["new"]


def test_a_restarted_daemon_goes_on_where_the_reader_stands(outcome):
    """From the whole log, or from one that was cut; numbers are given out once and for all."""
    core = make_core()
    open_stream(core)
    [first] = put(core, outcome("r1"))
    [second] = put(core, outcome("r2", prompt_id="p2"))
    core.handle(LEARNER, Commit(client="l", policy="llama", stream="s", upto=numbers_of(first)[-1]), 0.0)
    whole, snapshot, end = core.logged(), core.memory.snapshot(), len(core.log)
    while not core.move_up(end):
        core.handle(WORKER, Announce(client="w", policy="qwen", version=Version(0, 0)), 0.0)
    for opening, entries in ((None, whole), (snapshot, core.logged()[end:])):
        again = make_core()
        again.memory.restore(opening, entries)
        assert state(again).committed == numbers_of(first)[-1]
        [batch] = open_stream(again, after=numbers_of(first)[-1])
        assert (ids([batch]), numbers_of(batch)) == (["r2"], numbers_of(second))
        [later] = put(again, outcome("r3", prompt_id="p3"))
        assert numbers_of(later) > numbers_of(second)


def test_a_log_that_lost_its_end_gives_no_number_twice(outcome):
    """A reader has seen more than the daemon knows: what comes now comes behind that."""
    core = make_core()
    assert open_stream(core, after=1000) == []
    [batch] = put(core, outcome("r1"))
    assert (ids([batch]), numbers_of(batch)) == (["r1"], [1001])


def test_only_what_all_streams_have_committed_is_free(outcome):
    """Records that a stream is not of do not hold it back."""
    core = make_core()
    memory = core.memory
    core.handle(b"gemma", Hello(client="g", policy="gemma"), 0.0)
    open_stream(core)
    open_stream(core, client=b"gemma", tasks=["none of these"])
    [batch] = put(core, outcome("r1"), outcome("r2", prompt_id="p2"))
    assert memory.streams.freed == 0
    took(core, batch)
    for committed, upto in enumerate(numbers_of(batch), 1):
        core.handle(LEARNER, Commit(client="l", policy="llama", stream="s", upto=upto), 0.0)
        assert memory.streams.freed == committed
    core.handle(LEARNER, Commit(client="l", policy="gemma", stream="s", upto=10**6), 0.0)
    assert memory.streams.freed == 2


def test_what_was_committed_before_a_restart_stays_free(outcome):
    """Also while nobody has opened the stream again."""
    core = make_core()
    open_stream(core)
    [batch] = put(core, outcome("r1"))
    took(core, batch)
    core.handle(LEARNER, Commit(client="l", policy="llama", stream="s", upto=numbers_of(batch)[-1]), 0.0)
    again = make_core()
    again.memory.restore(None, core.logged())
    assert again.memory.streams.freed == numbers_of(batch)[-1]


def test_a_commit_waits_for_other_entries_and_not_for_long(outcome):
    """It goes with the next tick when nothing else comes, and counts at once."""
    core = make_core(is_slow=True)
    core.handle(LEARNER, Commit(client="l", policy="llama", stream="s", upto=1), 0.0)
    assert (core.memory.streams.freed, core.posted) == (1, [])
    core.tick(0.05)
    assert [type(read(entry)[0]) for _, entry in core.posted] == [Commit]


def test_an_empty_memory_does_not_take_more_than_its_budget(outcome):
    """What would be evicted before anybody read it waits instead."""
    core = make_core(budget_bytes=20_000, when_full="refuse", is_slow=True)
    for number in range(10):
        core.handle(WORKER, put_message(outcome(f"r{number}", prompt_id=f"p{number}", completion=bytes(5000))), 0.0)
    assert len(core.posted) <= 3


def test_a_put_that_never_fits_does_not_hold_up_the_others(outcome):
    """It is refused at once; what comes after it is taken."""
    core = make_core(budget_bytes=20_000, when_full="refuse", asked=False)
    [(_, ack)] = core.handle(WORKER, packed_message(outcome("large", completion=bytes(30_000))), 0.0)
    assert ack.refused == {"too_large": 1}
    [(_, ack)] = core.handle(WORKER, packed_message(outcome("small")), 0.0)
    assert (ack.stored, len(core.shelf)) == (1, 1)


def test_streams_are_bounded_and_belong_to_clients_that_said_hello():
    """Names cannot grow the tables without bound: neither those of one policy nor those of many."""
    core = make_core()
    for policy in range(MAX_STREAMS // MAX_STREAMS_PER_POLICY + 2):
        for key in (b"learner/%d", b"worker/%d", b"allocator/%d"):
            core.handle(key % policy, Hello(client="l", policy=f"p{policy}"), 0.0)
            for number in range(MAX_STREAMS_PER_KEY + 5):
                open_stream(core, client=key % policy, stream=f"{key}{number}")
        assert len(streams_of(core)) == min((policy + 1) * MAX_STREAMS_PER_POLICY, MAX_STREAMS)
    [(_, answer)] = core.handle(b"stranger", wish(), 0.0)
    assert isinstance(answer, Welcome)
    assert not answer.known


def test_a_new_stream_takes_the_place_of_one_that_is_neither_read_nor_committed():
    """Names of those who went away lock nobody out; positions that records depend on are kept."""
    core = make_core()
    for number in range(MAX_STREAMS_PER_KEY):
        open_stream(core, stream=f"s{number}")
    core.handle(LEARNER, Commit(client="l", policy="llama", stream="s0", upto=1), 0.0)
    core.handle(LEARNER, Hello(client="l", policy="llama"), 1.0)
    open_stream(core, 1.0, stream="new")
    names = {one.stream for one in streams_of(core)}
    assert names == {f"s{number}" for number in range(MAX_STREAMS_PER_KEY) if number != 1} | {"new"}


@pytest.mark.parametrize("hoards", ["opens", "commits"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_key_leaves_streams_to_the_other_keys_of_its_policy(hoards, is_restarted):
    """However many names it uses, also those of the others; its own stay what they are."""
    hostile = b"worker/llama/0"
    core = make_core()
    core.handle(hostile, Hello(client="h", policy="llama"), 0.0)
    open_stream(core, stream="own")
    core.handle(LEARNER, Commit(client="l", policy="llama", stream="own", upto=1), 0.0)
    for number in range(3 * MAX_STREAMS_PER_POLICY):
        open_stream(core, client=hostile, stream=f"s{number}")
        if hoards == "commits":
            commit = Commit(client="learner/llama", policy="llama", stream=f"s{number}", upto=1)
            core.handle(hostile, commit, 0.0)
    if is_restarted:
        log, core = core.logged(), make_core()
        core.memory.restore(None, log)
    for number in range(MAX_STREAMS_PER_KEY - 1):
        open_stream(core, stream=f"more{number}")
    open_stream(core, client=hostile, stream="own")
    readers = {one.stream: one.reader for one in streams_of(core)}
    own = [name for name, reader in readers.items() if reader == LEARNER.decode()]
    assert sorted(own) == sorted(
        [*(f"more{n}" for n in range(MAX_STREAMS_PER_KEY - 1)), *(() if is_restarted else ("own",))]
    )
    assert readers["own"] != hostile.decode()


def test_the_names_in_all_wishes_are_bounded(monkeypatch):
    """A stream beyond it is not opened, and one that is renewed counts once."""
    monkeypatch.setattr(streams, "MAX_WISHES_BYTES", 2000)
    core = make_core()
    names = ["n" * 200] * 3
    for number in range(5):
        open_stream(core, stream=f"s{number}", sources=names)
        open_stream(core, stream="s0", sources=names)
    assert [one.reader for one in streams_of(core)] == ["learner/llama"] * 2 + [""] * 3


def test_readers_together_have_a_window(outcome):
    """Beyond it each gets one batch at a time, and the rest as batches are taken."""
    core = make_core()
    for number in range(50):
        put(core, outcome(f"r{number}", prompt_id=f"p{number}", completion=bytes(100_000)))
    sent = {}
    for number in range(12):
        client = b"learner/p%d" % number
        core.handle(client, Hello(client="l", policy=f"p{number}"), 0.0)
        sent[number] = open_stream(core, client=client)
    sizes = [sum(len(encode(batch)) for batch in of_reader) for of_reader in sent.values()]
    assert 0.9 * TOTAL_WINDOW_BYTES < sum(sizes) < TOTAL_WINDOW_BYTES + 12 * streams.MAX_BATCH_BYTES
    assert len(sent[11]) == 1
    core.handle(b"learner/p0", Hello(client="l", policy="p0"), 0.0)
    took_last = Took(client="l", stream="s", upto=numbers_of(sent[11][-1])[-1])
    assert len(batches(core.handle(b"learner/p11", took_last, 0.0))) > 1


def test_to_a_reader_that_takes_nothing_one_batch_at_a_time_comes_again(outcome):
    """Until it takes one; also one that was sent before counts."""
    core = make_core()
    for number in range(20):
        put(core, outcome(f"r{number}", prompt_id=f"p{number}", completion=bytes(100_000)))
    sent = open_stream(core)
    assert len(sent) > 5
    assert ids(open_stream(core, RESEND_S)) == ids(sent[:1])
    assert took(core, sent[3], RESEND_S)[0].previous == numbers_of(sent[3])[-1]


def test_a_full_memory_that_refuses_keeps_what_is_not_committed(outcome):
    """Puts wait in order, their acknowledgements come as soon as streams commit, and nothing is evicted."""
    core = make_core(budget_bytes=50_000, when_full="refuse")
    core.handle(b"gemma", Hello(client="g", policy="gemma"), 0.0)
    open_stream(core)
    acks, sent = [], []

    def see(out):
        acks.extend(message.seq for _, message in out if isinstance(message, PutAck))
        sent.extend(batches(out))

    for number in range(12):
        size = 8000 if number % 2 else 100
        record = outcome(f"r{number}", prompt_id=f"p{number}", completion=bytes(size))
        for _ in range(2):  # the second one is a repetition
            see(core.handle(WORKER, put_message(record, seq=1 + number), 0.0))
    assert sorted(set(acks)) == list(range(1, 10))  # 9 Puts hold 4 x 8000 + 5 x 100 bytes, and 9 overheads
    while sent:
        batch = sent.pop(0)
        see(core.handle(LEARNER, Took(client="l", stream="s", upto=numbers_of(batch)[-1]), 0.0))
        see(core.handle(LEARNER, Commit(client="l", policy="llama", stream="s", upto=numbers_of(batch)[-1]), 0.0))
    assert sorted(set(acks)) == list(range(1, 13))
    [(_, stat)] = core.handle(b"x", StatRequest(client="x"), 0.0)
    [shelf] = [shelf for shelf in stat.shelves if shelf.policy == "qwen"]
    assert (shelf.put, shelf.evicted, stat.unstored) == (12, {}, 0)


def test_parked_puts_are_bounded_and_go_with_their_client(outcome):
    """Whatever a client sends while nothing is committed; what is left out is put again by its sender."""
    core = make_core(budget_bytes=50_000, when_full="refuse")
    for number in range(200):
        core.handle(WORKER, put_message(outcome(f"r{number}", completion=bytes(250_000)), seq=number), 0.0)
        core.handle(WORKER, put_message(outcome(f"s{number}", completion=bytes(30_000)), seq=1000 + number), 0.0)
    [(_, stat)] = core.handle(b"x", StatRequest(client="x"), 0.0)
    assert MAX_PARKED_BYTES / 300_000 < stat.unstored < MAX_PARKED_BYTES / 30_000
    core.handle(WORKER, Hello(client="w", policy="qwen"), 0.0)
    [(_, stat)] = core.handle(b"x", StatRequest(client="x"), 0.0)
    assert stat.unstored == 0


def test_a_parked_put_weighs_what_it_carries(outcome):
    """Hashes count, whatever its packs say about the records that lie in a spool."""
    parking = Parking()
    [pack] = packed_message(outcome()).packs
    pack = replace(pack, num_bytes=1, id_hashes=bytes(32_000))
    for seq in range(100):
        parking.park(WORKER, Put(client="w", seq=seq, packs=[pack] * 10))
    assert MAX_PARKED_BYTES / 400_000 < parking.num_waiting <= MAX_PARKED_BYTES / 320_000


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "hear", "carry", "lose", "wait", "restart reader", "restart producer",
                               "restart daemon", "ask", "say", "arrive"]),
              st.integers(0, 5)),
    max_size=60,
)  # fmt: skip


@settings(deadline=None)
@given(actions=ACTIONS, asked=st.booleans())
def test_every_record_comes_once_and_in_order(outcome, actions, asked):
    """Messages of both directions are lost or late, the reader goes back to its checkpoint, the daemon to its log.

    Records are in packs, or single because somebody asked for them; a reader may stop in the middle of a pack.
    A producer that is killed puts again, in other packs, what it had not heard to be stored.
    """
    core, reader, now_s, num_put, num_heard = make_core(asked=asked), reader_of(wish()), 0.0, 0, 0
    link, late, came, saved, num_stored = [], [], [], (0, 0), 0
    for action, value in [*actions, *[("wait", 0), ("carry", 99)] * 3]:
        match action:
            case "put":
                records = [outcome(f"r{n}", prompt_id=f"p{n}") for n in range(num_put, num_put + 1 + value)]
                link += batches(core.handle(WORKER, packed_message(*records), now_s))
                num_put += len(records)
                num_stored = max(num_put, num_stored)
            case "hear":
                num_heard = num_put
            case "restart producer":
                core.handle(WORKER, Hello(client="w", policy="qwen"), now_s)
                num_put = num_heard
            case "carry":
                while link and value >= 0:
                    batch, value = link.pop(0), value - 1
                    came += [(item.number, item.record.record_id) for item in (reader.take(batch) or ([], 0))[0]]
                    link += took_upto(core, reader, now_s)
            case "lose":
                del link[value : value + 2]
            case "wait":
                now_s += RESEND_S
                link += batches(core.handle(LEARNER, reader.wish, now_s)) + batches(core.tick(now_s))
            case "restart reader":
                if value:
                    saved = [(0, ""), *came][-value:][0][0], max(0, len(came) - value + 1)
                reader, link = reader_of(wish(after=saved[0])), []
                del came[saved[1] :]
                link += batches(core.handle(LEARNER, reader.wish, now_s))
            case "restart daemon":
                entries, core, link = core.logged(), LoggedCore(asked=asked and value > 2), []
                core.memory.restore(None, entries)
                core.log = [entry for _, entry in entries]
                for client, policy in ((LEARNER, "llama"), (WORKER, "qwen")):
                    core.handle(client, Hello(client="c", policy=policy), now_s)
            case "ask":
                core.memory.index(["outcome"])
            case "say":
                late.append(reader.wish)
            case "arrive" if value < len(late):
                link += batches(core.handle(LEARNER, late.pop(value), now_s))
    assert [record_id for _, record_id in came] == [f"r{number}" for number in range(num_stored)]


def reader_of(message):
    """The client's end of a stream, on another host than the daemon."""
    return Reader(message, SharedFiles(lambda: None, "l"))


def took_upto(core, reader, now_s):
    """The reader says how far it has come."""
    return batches(core.handle(LEARNER, Took(client="l", stream="s", upto=reader.came_to), now_s))
