"""Records of a run that ended: what is taken over, under which name, how old it is, and what is refused."""

import shutil
import sqlite3
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import RunFolderError
from mrl.exchange import replay as replay_module
from mrl.exchange.limits import Limits, held_bytes_of
from mrl.exchange.record_index import Entry
from mrl.exchange.replay import Replay, Shared, shared_in, take_over
from mrl.exchange.store import DISK_FULL, FILE, Store
from mrl.exchange.transaction import Transaction
from mrl.records.codec import decode, encode
from mrl.records.exchange_messages import Announce, Deliver, Fetch, Hello
from mrl.records.experience import experience_decoder
from mrl.records.tags import tags_of
from mrl.records.version import Version
from tests.support.stored_core import StoredCore

NAMES = {"qwen": "replay.qwen", "llama": "replay.llama"}


def write(folder, records, announcements=()):
    """A file that a run left behind."""
    store = Store(folder, Limits())
    bodies = [encode(record) for record in records]
    entries = [Entry(number, tags_of(body), body) for number, body in enumerate(bodies, 1)]
    assert store.commit(Transaction(inserts=entries, announcements=list(announcements))) == ""
    store.close()
    return folder


@pytest.fixture
def take(tmp_path):
    """Opens the own file, takes over what is in the file `old`, and closes it; returns what that gave."""

    def once(sources=NAMES, *, max_age_versions=None, **limits):
        bounds = Limits(**limits)
        store = Store(tmp_path / "own", bounds)
        try:
            return take_over(store, store.contents(), Replay(tmp_path / "old", sources, max_age_versions), bounds)
        finally:
            store.close()

    return once


def records_in(contents):
    """The records in order, decoded."""
    return [decode(entry.body, experience_decoder) for entry in contents.entries]


def test_records_become_those_of_a_source_that_stands_still(tmp_path, take, outcome, rollout, value):
    """Name, id and version are new; all that was said stays, log-probs included."""
    old = [outcome("o", "qwen", step=3), rollout("g", "llama", step=7), value("v", "qwen", step=9)]
    write(tmp_path / "old", old)
    contents, replayed = take()
    assert replayed == (3, 0, 0)
    assert records_in(contents) == [
        msgspec.structs.replace(
            record,
            source=f"replay.{record.source}",
            record_id=f"replay.{record.source}/{record.record_id}",
            oldest=Version(0, 0),
            newest=Version(0, 0),
        )
        for record in old
    ]
    assert [entry.number for entry in contents.entries] == [1, 2, 3]
    assert contents.last_number == 3
    assert contents.counts == {("replay.qwen", "stored", ""): 2, ("replay.llama", "stored", ""): 1}


def test_they_are_never_too_old_and_reach_a_policy_of_the_same_name(tmp_path, take, outcome):
    """Not for the strictest bound, and not after a thousand versions of everybody else."""
    write(
        tmp_path / "old", [outcome("o", "qwen", step=3)], [Announce(client="c", policy="qwen", version=Version(0, 9))]
    )
    contents, _ = take()
    core = StoredCore(max_age_versions=10)
    core.restore(contents)
    core.handle(b"q", Hello(client="q", policy="qwen"), 0.0)
    core.handle(b"q", Announce(client="q", policy="qwen", version=Version(0, 1000)), 0.0)
    ask = Fetch(
        client="q", policy="qwen", prompt_ids=["p1"], kinds=["outcome"], limit=4, max_age_versions=0, watch=True, seq=1
    )
    [(_, told)] = [one for one in core.handle(b"q", ask, 0.0) if isinstance(one[1], Deliver)]
    assert told.ages_versions == [0]
    assert decode(bytes(told.records[0]), experience_decoder).source == "replay.qwen"


def test_nothing_is_taken_over_twice(tmp_path, take, outcome):
    """Not by the next daemon, and not when the records have been removed since; the old file may be gone by then."""
    write(tmp_path / "old", [outcome("o1"), outcome("o2", prompt_id="p2")])
    first, replayed = take()
    assert replayed.num_held == 2
    shutil.rmtree(tmp_path / "old")
    again, replayed = take()
    assert replayed is None
    assert [one.body for one in again.entries] == [one.body for one in first.entries]
    assert again.counts == first.counts
    store = Store(tmp_path / "own", Limits())
    with sqlite3.connect(store.path) as connection:
        connection.execute("DELETE FROM records")
    connection.close()
    store.close()
    contents, replayed = take()
    assert (list(contents.entries), replayed) == ([], None)


def test_they_follow_what_the_own_file_holds(tmp_path, take, outcome):
    """A run that takes up a replay when it is resumed keeps its own records, and numbers go on."""
    write(tmp_path / "own", [outcome("live", "llama")])
    write(tmp_path / "old", [outcome("o", "qwen")])
    contents, replayed = take()
    assert replayed.num_held == 1
    assert [(one.number, one.tags.source) for one in contents.entries] == [(1, "llama"), (2, "replay.qwen")]


@settings(max_examples=40, deadline=None)
@given(
    told=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000)), min_size=1, max_size=8),
    budget=st.integers(1, 20_000),
)
def test_the_newest_are_taken_within_the_budget(tmp_path_factory, outcome, told, budget):
    """Against the definition: of the records from the newest to the oldest, the longest beginning that fits."""
    folder = tmp_path_factory.mktemp("replay")
    records = [
        outcome(f"r{n}", prompt_id=f"p{n}", step=step, completion=b"y" * size) for n, (step, size) in enumerate(told)
    ]
    write(folder / "old", records)
    newest_first = sorted(range(len(records)), key=lambda n: (-told[n][0], -n))

    def cost(n):
        renamed = msgspec.structs.replace(
            records[n], source="replay.qwen", record_id=f"replay.qwen/r{n}", oldest=Version(0, 0), newest=Version(0, 0)
        )
        return held_bytes_of(len(encode(renamed)))

    fitting = max(k for k in range(len(records) + 1) if sum(map(cost, newest_first[:k])) <= budget)
    limits = Limits(budget_bytes=budget)
    store = Store(folder / "own", limits)
    try:
        replay = Replay(folder / "old", NAMES)
        if not fitting:
            with pytest.raises(RunFolderError, match="no records that can be replayed"):
                take_over(store, store.contents(), replay, limits)
            return
        contents, replayed = take_over(store, store.contents(), replay, limits)
    finally:
        store.close()
    assert [record.record_id for record in records_in(contents)] == [
        f"replay.qwen/r{n}" for n in reversed(newest_first[:fitting])
    ]
    assert replayed == (fitting, len(records) - fitting, 0)


def test_age_at_the_end_of_the_run_is_asked_once(tmp_path, take, outcome):
    """It counts from the newest version of the newest epoch that the policy announced there."""
    records = [outcome(f"r{step}", prompt_id=f"p{step}", step=step) for step in (1, 4, 6)]
    news = [(0, 9, False), (1, 2, True), (1, 7, False)]
    write(
        tmp_path / "old",
        records,
        [Announce(client="c", policy="qwen", version=Version(e, s), resumed=r) for e, s, r in news],
    )
    contents, _ = take(max_age_versions=3)
    assert [record.record_id for record in records_in(contents)] == ["replay.qwen/r4", "replay.qwen/r6"]


def test_only_named_policies_and_records_without_a_question(tmp_path, take, outcome, request_for, score_of):
    """Scores and requests of an ended run answer nobody."""
    asked = request_for()
    write(tmp_path / "old", [outcome("o", "qwen"), outcome("o", "llama"), asked, score_of(asked)])
    contents, _ = take({"llama": "old.llama"})
    assert [record.source for record in records_in(contents)] == ["old.llama"]
    assert shared_in(tmp_path / "old") == [
        Shared("llama", "outcome", frozenset({"p1"})),
        Shared("qwen", "outcome", frozenset({"p1"})),
    ]


@pytest.mark.parametrize("has_log", [False, True])
def test_the_old_folder_is_left_as_it_is(tmp_path, take, outcome, has_log):
    """No byte and no file more, also where a daemon was killed and left its write-ahead log, which is read."""
    write(tmp_path / "old", [outcome("o1")])
    path = tmp_path / "old" / FILE
    if has_log:
        killed = sqlite3.connect(path, isolation_level=None)
        killed.execute("PRAGMA wal_autocheckpoint = 0")
        body = encode(outcome("o2", prompt_id="p2"))
        killed.execute("INSERT INTO records VALUES (2,'o2','outcome','qwen','p2','t',0,0,0,0,1.0,?)", (body,))
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "old", copy)
        killed.close()
        shutil.rmtree(tmp_path / "old")
        copy.rename(tmp_path / "old")
    before = {one.name: one.read_bytes() for one in sorted((tmp_path / "old").iterdir()) if one.suffix != ".sqlite-shm"}
    _, replayed = take()
    assert replayed.num_held == 1 + has_log
    after = {one.name: one.read_bytes() for one in sorted((tmp_path / "old").iterdir()) if one.suffix != ".sqlite-shm"}
    assert {name: body for name, body in after.items() if not name.endswith("-shm")} == {
        name: body for name, body in before.items() if not name.endswith("-shm")
    }
    assert has_log or after.keys() == before.keys()


def damage_schema(path):
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()


def damage_records(path):
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE records SET body = x'80'")
    connection.close()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damage_schema, r"another version of mrl; got 'schema 7'; wanted schema 1; cure: remove sharing\.replay"),
        (damage_records, r"no records that can be replayed; got '1 unreadable rows'"),
        (lambda path: path.write_bytes(b"no database" * 999), r"the exchange's file cannot be used"),
        (lambda path: path.unlink(), r"no exchange file found"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(tmp_path, take, outcome, damage, told):
    """And the own file stays as it was."""
    write(tmp_path / "old", [outcome("o")])
    damage(tmp_path / "old" / FILE)
    with pytest.raises(RunFolderError, match=told) as caught:
        take()
    assert "\n" not in str(caught.value)
    own = Store(tmp_path / "own", Limits())
    assert (list(own.contents().entries), own.contents().counts) == ([], {})
    own.close()


def test_rows_that_are_no_record_are_counted(tmp_path, take, outcome):
    """They cost nothing else."""
    write(tmp_path / "old", [outcome("o1"), outcome("o2", prompt_id="p2")])
    with sqlite3.connect(tmp_path / "old" / FILE) as connection:
        connection.execute("UPDATE records SET body = x'80' WHERE record_id = 'o1'")
    connection.close()
    contents, replayed = take()
    assert replayed == (1, 0, 1)
    assert [record.record_id for record in records_in(contents)] == ["replay.qwen/o2"]


def test_a_full_disk_is_told_and_nothing_is_taken(tmp_path, take, outcome, monkeypatch):
    """The next start tries again."""
    write(tmp_path / "old", [outcome("o")])
    with monkeypatch.context() as patched:
        patched.setattr(replay_module.Store, "commit", lambda store, transaction: DISK_FULL)
        with pytest.raises(RunFolderError, match=r"the replayed records could not be stored \(disk_full\)"):
            take()
    contents, replayed = take()
    assert replayed.num_held == 1
    assert Counter(contents.counts) == Counter({("replay.qwen", "stored", ""): 1})
