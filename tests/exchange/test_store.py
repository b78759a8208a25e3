"""The file: what is committed is there again, whatever happened to the daemon, the disk or the file."""

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import DiskBroken, RunFolderError
from mrl.exchange import store as store_module
from mrl.exchange.archive import ROWS_OF_A_PART, read_records
from mrl.exchange.limits import Limits
from mrl.exchange.record_index import Entry
from mrl.exchange.store import CHECKPOINT_BYTES, DISK_FULL, FILE, LOCKED, MAX_WAL_BYTES, ROWS_AT_ONCE, Store
from mrl.exchange.transaction import Judged, Removal, Transaction
from mrl.records.codec import encode
from mrl.records.exchange_messages import Announce, Hello
from mrl.records.tags import tags_of
from mrl.records.version import Version
from tests.support.stored_core import StoredCore, put_message


@pytest.fixture
def open_store(tmp_path):
    """Opens the file of the test's folder; what was opened before is closed."""
    opened = []

    def open_one(**limits) -> Store:
        while opened:
            opened.pop().close()
        opened.append(Store(tmp_path / "exchange", Limits(**limits)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def entry(number, record):
    """A record as the core hands it over."""
    body = encode(record)
    return Entry(number, tags_of(body), body)


def inserting(*entries, seq=1):
    """A transaction that stores these."""
    return Transaction(puts=[Judged(b"w", "qwen", seq, len(entries), Counter())], inserts=list(entries))


def removal_of(one, reason="full"):
    """That it goes."""
    return Removal(one.number, one.record_id, one.tags.source, one.tags.type, reason)


def summary(contents):
    """What a daemon would find, in a form that can be compared."""
    entries = [(one.number, one.tags, one.body) for one in contents.entries]
    return entries, list(contents.announcements), list(contents.removed_ids), contents.counts, contents.last_number


def test_what_is_committed_is_there_again(open_store, outcome, rollout):
    """Records as they came, versions and resumes in their order, ids of what went, and what was counted."""
    store = open_store()
    first, second, third = entry(1, outcome("r1")), entry(2, rollout("g1")), entry(3, outcome("r2", step=4))
    news = [
        Announce(client="c", policy="qwen", version=Version(0, 9)),
        Announce(client="c", policy="qwen", version=Version(1, 5), resumed=True),
        Announce(client="c", policy="qwen", version=Version(1, 6)),
        Announce(client="c", policy="qwen", version=Version(1, 7)),
    ]
    assert store.commit(inserting(first, second)) == ""
    done = Transaction(
        puts=[Judged(b"w", "qwen", 2, 1, Counter(stale=3))],
        inserts=[third],
        removals=[removal_of(first, "surpassed")],
        announcements=news,
    )
    assert store.commit(done) == ""
    store = open_store()
    entries, announced, removed, counts, last = summary(store.contents())
    assert (store.damage, store.set_aside) == ("", None)
    assert [(number, tags.record_id) for number, tags, _ in entries] == [(2, "g1"), (3, "r2")]
    assert [body for *_, body in entries] == [encode(rollout("g1")), encode(outcome("r2", step=4))]
    told = [(one.version, one.resumed) for one in announced]
    assert told == [(Version(0, 9), False), (Version(1, 5), True), (Version(1, 7), False)]
    assert (removed, last) == (["r1"], 3)
    assert counts == {
        ("qwen", "stored", ""): 3, ("qwen", "refused", "stale"): 3, ("qwen", "removed", "surpassed"): 1
    }  # fmt: skip


@settings(deadline=None, max_examples=20)
@given(sizes=st.lists(st.integers(0, sum(ROWS_AT_ONCE) + 3), min_size=1, max_size=4), seed=st.randoms())
def test_any_number_of_rows_goes_in_and_out(tmp_path_factory, outcome, sizes, seed):
    """Statements take many rows at once; none is left out, and none is there twice."""
    store = Store(tmp_path_factory.mktemp("store"), Limits(durability="written"))
    held, number = {}, 0
    for size in sizes:
        entries = [entry(number + n, outcome(f"r{number + n}")) for n in range(1, size + 1)]
        gone = [held.pop(n) for n in seed.sample(sorted(held), k=len(held) // 2)]
        transaction = inserting(*entries)
        transaction.removals = [removal_of(one) for one in gone]
        assert store.commit(transaction) == ""
        held |= {one.number: one for one in entries}
        number += size
    assert [one.number for one in store.contents().entries] == sorted(held)
    assert len(store.contents().removed_ids) == number - len(held)
    store.close()


def test_a_killed_daemon_loses_nothing_that_it_was_told_is_committed(tmp_path, outcome):
    """The process ends in the middle of the next transaction: that one is gone, and nothing else."""
    code = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        sys.path[:0] = ["tests/support", "tests/exchange"]
        from test_store import entry, inserting
        from mrl.exchange.limits import Limits
        from mrl.exchange.store import Store
        from mrl.records.codec import decode
        from mrl.records.experience import OutcomeRecord, experience_decoder
        import msgspec

        record = decode(bytes.fromhex(sys.argv[2]), experience_decoder)
        store = Store(Path(sys.argv[1]), Limits(durability="written"))
        for number in range(1, 50):
            assert store.commit(inserting(entry(number, msgspec.structs.replace(record, record_id=f"r{number}")))) == ""
            store.checkpoint(is_idle=True)
        store._connection.execute("BEGIN IMMEDIATE")
        store._insert("counts", 4, [("half", "done", "", 1)])
        os.kill(os.getpid(), 9)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), encode(outcome()).hex()], env=os.environ | {"PYTHONPATH": "."}
    )
    assert done.returncode == -9
    contents = Store(tmp_path, Limits()).contents()
    assert [one.record_id for one in contents.entries] == [f"r{number}" for number in range(1, 50)]
    assert ("half", "done", "") not in contents.counts


def test_the_remembered_ids_are_bounded_and_the_newest_stay(open_store, outcome):
    """Over many transactions, and over a restart."""
    store = open_store(remembered_ids=10)
    for number in range(1, 26):
        one = entry(number, outcome(f"r{number}"))
        assert store.commit(inserting(one)) == ""
        assert store.commit(Transaction(removals=[removal_of(one)])) == ""
        if number == 13:
            store = open_store(remembered_ids=10)
    assert open_store(remembered_ids=10).contents().removed_ids == [f"r{number}" for number in range(16, 26)]


def test_numbers_go_on_where_they_were(open_store, outcome):
    """Also when the last record is held no longer."""
    store = open_store()
    one = entry(7, outcome())
    store.commit(inserting(one))
    store.commit(Transaction(removals=[removal_of(one)]))
    assert open_store().contents().last_number == 7


def test_the_file_does_not_grow_with_what_passes_through(open_store, rollout):
    """Deleted pages are used again, and the write-ahead log is short."""
    store = open_store(durability="written")
    held = []
    for number in range(1, 400):
        one = entry(number, rollout(f"g{number}", group=8, tokens=500))
        held.append(one)
        transaction = inserting(one)
        transaction.removals = [removal_of(held.pop(0))] if len(held) > 20 else []
        assert store.commit(transaction) == ""
        store.checkpoint(is_idle=True)
    body_bytes = len(held[0].body)
    assert 400 * body_bytes > 12_000_000
    assert store.file_bytes < 40 * body_bytes + 3 * CHECKPOINT_BYTES


def test_a_slow_reader_does_not_make_the_write_ahead_log_grow(open_store, rollout):
    """Somebody looks at each record for minutes while the run goes on; of what has left by then nothing is told."""
    store = open_store(durability="written")
    held = [entry(number, rollout(f"g{number}", group=8, tokens=500)) for number in range(1, 2 * ROWS_OF_A_PART + 1)]
    assert store.commit(inserting(*held)) == ""
    reader = read_records(store.path)
    told = [next(reader).record_id]
    for number in range(len(held) + 1, 500):
        one = entry(number, rollout(f"g{number}", group=8, tokens=500))
        held.append(one)
        transaction = inserting(one)
        transaction.removals = [removal_of(held.pop(0))]
        assert store.commit(transaction) == ""
        store.checkpoint(is_idle=True)
    assert store.file_bytes < MAX_WAL_BYTES
    told += [record.record_id for record in reader]
    assert told == [f"g{number}" for number in range(1, ROWS_OF_A_PART + 1)]


def test_a_busy_daemon_checkpoints_too_though_more_seldom(open_store, rollout):
    """Or the write-ahead log would have no end."""
    store = open_store(durability="written")
    one = rollout("g", group=64, tokens=2000)
    body_bytes = len(encode(one))
    for number in range(1, 3 * MAX_WAL_BYTES // body_bytes):
        new = entry(number, rollout(f"g{number}", group=64, tokens=2000))
        store.commit(inserting(new))
        store.commit(Transaction(removals=[removal_of(new)]))
        store.checkpoint(is_idle=False)
        assert store.file_bytes < 2 * MAX_WAL_BYTES


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 6 MB; skipped where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_fails_a_transaction_and_nothing_before_it(small_disk, rollout):
    """What was committed stays; as soon as there is room, it goes on."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes(3_000_000))
    store, number, failure = Store(small_disk, Limits()), 0, ""
    while not failure:
        number += 1
        failure = store.commit(inserting(entry(number, rollout(f"g{number}", group=8, tokens=500))))
        store.checkpoint(is_idle=True)
    assert (failure, number > 10) == (DISK_FULL, True)
    again = inserting(entry(number, rollout(f"g{number}", group=8, tokens=500)))
    assert store.commit(again) == store.commit(Transaction()) == DISK_FULL
    filler.unlink()
    assert store.commit(Transaction()) == store.commit(again) == ""
    store.close()
    store = Store(small_disk, Limits())
    assert len(list(store.contents().entries)) == number
    store.close()


def test_somebody_else_who_writes_is_waited_for_and_named(open_store, outcome, monkeypatch):
    """A person with a tool may hold the file for a while; nobody is told that anything is stored."""
    store = open_store()
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert store.commit(inserting(entry(1, outcome()))) == LOCKED
    other.execute("ROLLBACK")
    assert store.commit(inserting(entry(1, outcome()))) == ""
    other.close()


def test_others_read_while_the_daemon_writes(open_store, outcome):
    """They see what was committed when they began, and stop nobody."""
    store = open_store()
    store.commit(inserting(entry(1, outcome("r1"))))
    other = sqlite3.connect(f"file:{store.path}?mode=ro", uri=True, isolation_level=None)
    other.execute("BEGIN")
    assert other.execute("SELECT record_id, reward FROM records").fetchall() == [("r1", 1.0)]
    assert store.commit(inserting(entry(2, outcome("r2")))) == ""
    assert other.execute("SELECT count(*) FROM records").fetchone() == (1,)
    other.execute("COMMIT")
    assert other.execute("SELECT count(*) FROM records").fetchone() == (2,)
    other.close()


def test_a_second_daemon_is_refused(open_store, tmp_path):
    """While the first has the file, and not after it has let go."""
    store = open_store()
    with pytest.raises(RunFolderError, match="another exchange daemon"):
        Store(tmp_path / "exchange", Limits())
    store.close()
    Store(tmp_path / "exchange", Limits()).close()


@pytest.mark.parametrize("damage", ["no file of SQLite", "cut", "page of zeros", "header alone", "zeros within"])
def test_a_damaged_file_is_set_aside_and_a_new_one_takes_its_place(open_store, rollout, outcome, damage):
    """It stays as it is, under another name, and what it held by its own account is counted."""
    store = open_store(durability="written")
    for number in range(1, 30):
        store.commit(inserting(entry(number, rollout(f"g{number}", group=8, tokens=500))))
    path = store.path
    store.close()
    content = path.read_bytes()
    page_bytes = int.from_bytes(content[16:18], "big")
    spoiled = {
        "no file of SQLite": b"garbage" + bytes(len(content)),
        "cut": content[: len(content) // 3],
        "page of zeros": content[:page_bytes] + bytes(page_bytes) + content[2 * page_bytes :],
        "header alone": content[:100],
        "zeros within": content[: 7 * page_bytes] + bytes(9 * page_bytes) + content[16 * page_bytes :],
    }[damage]
    path.write_bytes(spoiled)
    for turn in (1, 2):
        store = open_store()
        assert store.set_aside == path.with_name(f"{FILE}.damaged-{turn}")
        assert store.damage
        assert store.num_lost in (29, None)
        assert store.set_aside.read_bytes()[: len(spoiled)] == spoiled
        assert list(store.contents().entries) == []
        assert store.commit(inserting(entry(1, outcome()))) == ""
        assert open_store().set_aside is None
        assert [one.number for one in store_of(open_store)] == [1]
        open_store().close()
        for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
            path.with_name(name).unlink(missing_ok=True)
        path.write_bytes(spoiled)


def store_of(open_store):
    """What is in the file."""
    return open_store().contents().entries


def test_damage_that_the_check_had_no_time_for_is_found_when_it_is_read(open_store, rollout, monkeypatch):
    """The check of a long file ends in the middle; the daemon still goes on with a new one."""
    store = open_store(durability="written")
    for number in range(1, 30):
        store.commit(inserting(entry(number, rollout(f"g{number}", group=8, tokens=500))))
    path = store.path
    store.close()
    content = path.read_bytes()
    page_bytes = int.from_bytes(content[16:18], "big")
    path.write_bytes(content[: 7 * page_bytes] + bytes(9 * page_bytes) + content[16 * page_bytes :])
    monkeypatch.setattr(store_module, "_check", lambda _: None)
    store = open_store()
    assert store.set_aside is None
    assert list(store.contents().entries) == []
    assert (store.set_aside, store.num_lost) == (path.with_name(f"{FILE}.damaged-1"), 29)


@pytest.mark.parametrize("gone", ["folder", FILE, f"{FILE}-wal", "lock"])
def test_what_is_deleted_under_the_daemon_acknowledges_nothing_more(open_store, outcome, gone):
    """Noticed with the next write; the next daemon begins with what is there."""
    store = open_store()
    assert store.commit(inserting(entry(1, outcome("r1")))) == ""
    if gone == "folder":
        shutil.rmtree(store.path.parent)
    else:
        store.path.with_name(gone).unlink()
    with pytest.raises(DiskBroken, match="deleted or replaced"):
        store.commit(inserting(entry(2, outcome("r2"))))
    assert open_store().commit(inserting(entry(3, outcome("r3")))) == ""


def test_a_deleted_lock_lets_no_second_daemon_in(open_store, tmp_path):
    """The folder itself is locked too."""
    store = open_store()
    store.path.with_name("lock").unlink()
    with pytest.raises(RunFolderError, match="another exchange daemon"):
        Store(tmp_path / "exchange", Limits())


def test_a_torn_write_ahead_log_ends_at_the_last_whole_transaction(tmp_path, outcome):
    """At every length that it may have after a power cut, what is left is a beginning of what was committed."""
    store = Store(tmp_path / "a", Limits(durability="written"))
    for number in range(1, 6):
        store.commit(inserting(entry(number, outcome(f"r{number}"))))
    names = [FILE, f"{FILE}-wal"]
    contents = {name: (tmp_path / "a" / name).read_bytes() for name in names}
    found = []
    for length in range(0, len(contents[names[1]]) + 1, 20_011):
        folder = tmp_path / f"cut-{length}"
        folder.mkdir()
        (folder / names[0]).write_bytes(contents[names[0]])
        (folder / names[1]).write_bytes(contents[names[1]][:length])
        cut = Store(folder, Limits())
        found.append([one.number for one in cut.contents().entries])
        cut.close()
        shutil.rmtree(folder)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in found)
    assert [len(numbers) for numbers in found] == sorted(len(numbers) for numbers in found)
    assert len(found[-1]) >= 4
    store.close()


def test_a_file_of_another_schema_is_refused_by_its_version(open_store):
    """It is not touched."""
    store = open_store()
    path = store.path
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(RunFolderError, match=r"unsupported schema version.*99.*1"):
        open_store()


def test_an_error_after_which_nobody_knows_ends_the_daemon(open_store, outcome):
    """Here the table itself is gone."""
    store = open_store()
    with sqlite3.connect(store.path) as other:
        other.execute("DROP TABLE records")
    with pytest.raises(DiskBroken, match="records"):
        store.commit(inserting(entry(1, outcome())))


def test_a_row_that_holds_no_record_is_counted_and_left_out(open_store, outcome):
    """Somebody wrote to the file by hand."""
    store = open_store()
    store.commit(inserting(entry(1, outcome("r1")), entry(2, outcome("r2"))))
    with sqlite3.connect(store.path) as other:
        other.execute("UPDATE records SET body = x'00' WHERE number = 1")
    assert [one.record_id for one in store.contents().entries] == ["r2"]
    assert store.num_unreadable == 1


def test_core_and_file_agree_after_any_history(tmp_path, outcome):
    """What a core holds, and what one that opens its file holds, is the same after every transaction."""
    core, store = StoredCore(successes_per_prompt=2, budget_bytes=20_000), Store(tmp_path, Limits())
    core.handle(b"w", Hello(client="w", policy="qwen"), 0.0)
    for number in range(60):
        core.handle(b"w", put_message(outcome(f"r{number}", prompt_id=f"p{number % 7}", step=number // 3)), 0.0)
        if number % 9 == 0:
            version = Version(0, number // 3)
            core.handle(b"w", Announce(client="w", policy="qwen", version=version), 0.0)
    for transaction in core.committed:
        assert store.commit(transaction) == ""
    again = StoredCore(successes_per_prompt=2, budget_bytes=20_000)
    again.restore(store.contents())
    again.commit_all(0.0)
    assert [one.record_id for one in again.index.entries()] == [one.record_id for one in core.index.entries()]
    mine, its = core.stat(0.0), again.stat(0.0)
    assert (mine.policies, mine.used_bytes) == (its.policies, its.used_bytes)
    store.close()
