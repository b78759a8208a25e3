"""The file of a run's exchange: one SQLite database that holds everything acknowledged.

`docs/exchange.md` shows how to read the tables. Records are kept as their sources encoded them, as msgpack maps;
`number` is the order in which they came. A row goes when its record is held no longer. `removed` has the reasons of the
newest 32,768 removals, and `counts` adds up all records that were ever stored, refused and removed.

A damaged file is set aside under another name, and a new one takes its place. A write-ahead log that is merely torn at
its end is no damage. A daemon whose file was deleted or replaced acknowledges nothing more.

A committed transaction is on the disk (`synced`), or in the kernel's hands (`written`); SQLite replays its write-ahead
log when the file is opened. Writers overwrite nothing that readers may see, so that others can read at any time.
"""

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mrl.config.locks import is_still, lock_folder, unlock
from mrl.errors import DiskBroken, RunFolderError
from mrl.exchange.contents import Contents
from mrl.exchange.limits import Durability, Limits
from mrl.exchange.record_index import Entry
from mrl.exchange.transaction import Transaction
from mrl.files import has_room
from mrl.records.exchange_messages import Announce
from mrl.records.tags import mean_reward_of, tags_of
from mrl.records.version import Version

FILE = "exchange.sqlite"
LOCK = "lock"
SCHEMA_VERSION = 1
APPLICATION_ID = 0x6D726C78
"""Application id in the file's header, which `file` and SQLite show: "mrlx"."""
PAGE_BYTES = 32 * 1024
CACHE_KIB = 4 * 1024
CHECKPOINT_BYTES = 2 * 1024 * 1024
"""Length of the write-ahead log at which its pages are copied to the database while no transaction waits. Short, so
that a transaction that comes meanwhile does not wait for long."""
MAX_WAL_BYTES = 16 * CHECKPOINT_BYTES
"""Length of the write-ahead log at which its pages are copied although a transaction may wait."""
LOCKED_S = 1.0
"""Seconds that a transaction waits for another process that writes to the file."""
ROWS_AT_ONCE = (64, 16, 4, 1)
"""Rows of one statement: few statements, since each has to wait for the interpreter's lock."""
DISK_FULL, LOCKED = "disk_full", "locked"
"""Reasons why a transaction was not committed."""
# SQLITE_FULL stands for ENOSPC alone; a quota or a limit of the process is told as another error of a write.
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
_NOT_ALONE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
CHECK_S = 20.0
"""Seconds that the check of the file at its opening may take; damage beyond that is found when it is read."""
HELD = "SELECT sum(CASE what WHEN 'stored' THEN records WHEN 'removed' THEN -records ELSE 0 END) FROM counts"

SCHEMA = """
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    record_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    source TEXT NOT NULL,
    prompt_id TEXT NOT NULL,
    task TEXT NOT NULL,
    run_epoch INTEGER NOT NULL,
    oldest_step INTEGER NOT NULL,
    newest_epoch INTEGER NOT NULL,
    newest_step INTEGER NOT NULL,
    reward REAL,
    body BLOB NOT NULL
);
CREATE TABLE removed (
    place INTEGER PRIMARY KEY,
    number INTEGER NOT NULL,
    record_id TEXT NOT NULL,
    source TEXT NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL
);
CREATE TABLE counts (
    policy TEXT NOT NULL,
    what TEXT NOT NULL,
    reason TEXT NOT NULL,
    records INTEGER NOT NULL,
    PRIMARY KEY (policy, what, reason)
) WITHOUT ROWID;
CREATE TABLE versions (
    policy TEXT NOT NULL,
    run_epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    resumed INTEGER NOT NULL,
    PRIMARY KEY (policy, run_epoch, resumed)
) WITHOUT ROWID;
"""
"""`versions` holds the newest step of each run epoch, and with `resumed` the step at which a resume opened it."""

TABLES = ("records", "removed", "counts", "versions")
RECORD_COLUMNS, REMOVED_COLUMNS = 12, 6
COUNT = (
    "INSERT INTO counts VALUES (?,?,?,?) "
    "ON CONFLICT (policy, what, reason) DO UPDATE SET records = records + excluded.records"
)


class Store:
    """The file, opened for writing by one daemon. Used by one thread at a time."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        """Open the file of the folder, or make it; a damaged one is set aside. Raises RunFolderError."""
        self.path = folder / FILE
        self.num_unreadable = 0
        """Rows that hold no record, and were left out."""
        self.set_aside: Path | None = None
        """Path of the damaged file that was set aside; None where none was."""
        self.damage = ""
        """SQLite's words about the damaged file."""
        self.num_lost: int | None = None
        """Records that the damaged file held by its own account; None where that is damaged too."""
        self._durability = limits.durability
        self._remembered_ids = limits.remembered_ids
        self._wal_bytes = MAX_WAL_BYTES  # the log of an earlier daemon may be this long
        self._failed_bytes = PAGE_BYTES
        self._file = -1
        self._lock = _locked(folder)
        try:
            try:
                self._open()
                _check(self._connection)
            except sqlite3.DatabaseError as error:
                self._begin_anew(error)
        except sqlite3.Error as error:
            self._let_go()
            raise damaged(self.path, error) from error
        except RunFolderError:
            self._let_go()
            raise

    @property
    def file_bytes(self) -> int:
        """Bytes of the file and of the write-ahead log beside it."""
        return sum(map(_length, (self.path, self.path.with_name(f"{FILE}-wal"))))

    def contents(self) -> Contents:
        """Return the file's contents; of a file that turns out to be damaged, nothing. Raises RunFolderError."""
        try:
            try:
                return self._contents()
            except sqlite3.DatabaseError as error:
                self._begin_anew(error)
                return self._contents()
        except sqlite3.Error as error:
            raise damaged(self.path, error) from error

    def _contents(self) -> Contents:
        last_number = max(
            self._number("SELECT max(number) FROM records"), self._number("SELECT max(number) FROM removed")
        )
        removed = "SELECT record_id FROM removed ORDER BY place"
        versions = "SELECT policy, run_epoch, step, resumed FROM versions ORDER BY policy, run_epoch, resumed DESC"
        return Contents(
            entries=list(self._entries()),
            announcements=[
                Announce(client="store", policy=policy, version=Version(epoch, step), resumed=bool(resumed))
                for policy, epoch, step, resumed in self._rows(versions)
            ],
            removed_ids=[record_id for (record_id,) in self._rows(removed)],
            counts={(policy, what, reason): n for policy, what, reason, n in self._rows("SELECT * FROM counts")},
            last_number=last_number,
        )

    def commit(self, transaction: Transaction) -> str:
        """Commit a transaction. Returns why it failed, and then nothing of it is in the file; "" when it is committed.

        An empty one fails while there is no room for what failed last. Raises DiskBroken when the file's state is
        unknown.
        """
        if transaction.is_empty and not has_room(self.path.parent, self._failed_bytes):
            return DISK_FULL
        connection = self._connection
        num_pages = len(TABLES) + sum(len(entry.body) // PAGE_BYTES + 1 for entry in transaction.inserts)
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._insert("records", RECORD_COLUMNS, map(_row, transaction.inserts))
            self._remove(transaction)
            connection.executemany(
                "INSERT OR REPLACE INTO versions VALUES (?,?,?,?)",
                [(m.policy, m.version.run_epoch, m.version.step, m.resumed) for m in transaction.announcements],
            )
            connection.executemany(COUNT, [(*key, number) for key, number in sorted(transaction.counts().items())])
            connection.execute("COMMIT")
            self._last_place += len(transaction.removals)
            self._wal_bytes += num_pages * PAGE_BYTES
        except sqlite3.Error as error:
            self._failed_bytes = num_pages * PAGE_BYTES
            return self._failure(error)
        self._check_there()
        return ""

    def checkpoint(self, *, is_idle: bool) -> None:
        """Copy the pages of a long write-ahead log to the database. Raises DiskBroken."""
        if self._wal_bytes < (CHECKPOINT_BYTES if is_idle else MAX_WAL_BYTES):
            return
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            self._failure(error)  # on a full disk the log goes on growing, or the next commit is refused
        self._wal_bytes = 0

    def close(self) -> None:
        """Copy the write-ahead log to the database, and let go of the file."""
        if self._lock:
            self._let_go()

    def _open(self) -> None:
        self._connection = sqlite3.connect(self.path, timeout=LOCKED_S, isolation_level=None, check_same_thread=False)
        _prepare(self._connection, self.path, self._durability)
        self._last_place = self._number("SELECT max(place) FROM removed")
        self._file = os.open(self.path, os.O_PATH | os.O_CLOEXEC)

    def _begin_anew(self, error: sqlite3.DatabaseError) -> None:
        """Set a damaged file aside and make a new one; any other error is raised again."""
        if isinstance(error, sqlite3.OperationalError):
            raise error
        with suppress(sqlite3.Error, AttributeError):
            self.num_lost = self._number(HELD)
        self._close_file()
        self.damage = " ".join(str(error).split())
        self.set_aside = _free_name(self.path)
        for suffix in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(f"{self.set_aside}{suffix}")
        self._open()

    def _check_there(self) -> None:
        """Raises DiskBroken where the files just written to were deleted or replaced, so that nobody will find them."""
        folder = self.path.parent
        has_all = is_still(self._file, self.path) and (folder / f"{FILE}-wal").exists()
        if not has_all or not is_still(self._lock[0], folder / LOCK):
            raise DiskBroken(f"{self.path}: the file or its lock was deleted or replaced while it was in use")

    def _close_file(self) -> None:
        with suppress(sqlite3.Error, AttributeError):  # then the write-ahead log stays, with what is committed
            self._connection.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _let_go(self) -> None:
        self._close_file()
        unlock(self._lock)

    def _insert(self, table: str, num_columns: int, rows: Iterable[Sequence[Any]]) -> None:
        """Insert rows in few statements."""
        left = list(rows)
        one = f"({','.join('?' * num_columns)})"
        for size in ROWS_AT_ONCE:
            statement = f"INSERT INTO {table} VALUES {','.join([one] * size)}"
            while len(left) >= size:
                self._connection.execute(statement, [value for row in left[:size] for value in row])
                del left[:size]

    def _remove(self, transaction: Transaction) -> None:
        numbers = [removal.number for removal in transaction.removals]
        for size in ROWS_AT_ONCE:
            statement = f"DELETE FROM records WHERE number IN ({','.join('?' * size)})"
            while len(numbers) >= size:
                self._connection.execute(statement, numbers[:size])
                del numbers[:size]
        placed = enumerate(transaction.removals, self._last_place + 1)
        self._insert("removed", REMOVED_COLUMNS, [(place, *removal) for place, removal in placed])
        last_kept = self._last_place + len(transaction.removals) - self._remembered_ids
        self._connection.execute("DELETE FROM removed WHERE place <= ?", (last_kept,))

    def _failure(self, error: sqlite3.Error) -> str:
        code = getattr(error, "sqlite_errorcode", 0)
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        if code in _NO_ROOM:
            return DISK_FULL
        if code & 0xFF in _NOT_ALONE:
            return LOCKED
        raise DiskBroken(f"{self.path}: {error}") from error

    def _entries(self) -> Iterator[Entry]:
        for number, body in self._rows("SELECT number, body FROM records ORDER BY number"):
            tags = tags_of(body)
            if tags is None:
                self.num_unreadable += 1
            else:
                yield Entry(number, tags, body)

    def _rows(self, query: str) -> sqlite3.Cursor:
        return self._connection.execute(query)

    def _number(self, query: str) -> int:
        [(number,)] = self._rows(query)
        return int(number or 0)


def _prepare(connection: sqlite3.Connection, path: Path, durability: Durability) -> None:
    """Apply the settings, and make the tables of a new file. Raises RunFolderError for another schema."""
    settings = {
        "page_size": PAGE_BYTES,
        "journal_mode": "WAL",
        "synchronous": "FULL" if durability == "synced" else "NORMAL",
        "wal_autocheckpoint": 0,
        "journal_size_limit": MAX_WAL_BYTES,
        "cache_size": -CACHE_KIB,
        # Deleted rows are no secret of this file; writing zeros over them costs as much as storing.
        "secure_delete": "OFF",
    }
    for name, value in settings.items():
        connection.execute(f"PRAGMA {name} = {value}")
    [(version,)] = connection.execute("PRAGMA user_version")
    if version == 0:
        connection.executescript(
            f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    elif version != SCHEMA_VERSION:
        raise RunFolderError(
            "the exchange's file has an unsupported schema version",
            where=str(path),
            got=version,
            wanted=str(SCHEMA_VERSION),
            cure="use the version of mrl that made the file, or move the file away",
        )


def _check(connection: sqlite3.Connection) -> None:
    """Check whether the file is sound, for CHECK_S at most. Raises DatabaseError when it is not."""
    until_s = time.monotonic() + CHECK_S
    connection.set_progress_handler(lambda: time.monotonic() > until_s, 10_000)
    try:
        found = [line for (line,) in connection.execute("PRAGMA quick_check(50)")]
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        found = []
    finally:
        connection.set_progress_handler(None, 0)
    # SQLite 3.40 reports NULL values in sound tables without row ids; those are read whole anyway.
    bad = [line for line in found if line != "ok" and not line.startswith("NULL value in ")]
    if bad:
        raise sqlite3.DatabaseError(bad[0])


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside


def _locked(folder: Path) -> list[int]:
    """Return descriptors that hold the folder's lock. Raises RunFolderError where another daemon has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = lock_folder(folder, LOCK)
    except OSError as error:
        raise RunFolderError(f"cannot use the exchange's folder ({error.strerror})", where=str(folder)) from error
    if held is None:
        raise RunFolderError(
            "another exchange daemon has this file open", where=str(folder / FILE), cure="stop that daemon first"
        )
    return held


def _row(entry: Entry) -> tuple[Any, ...]:
    tags = entry.tags
    return (
        entry.number,
        tags.record_id,
        tags.type,
        tags.source,
        tags.prompt_id,
        tags.task,
        tags.oldest.run_epoch,
        tags.oldest.step,
        tags.newest.run_epoch,
        tags.newest.step,
        mean_reward_of(entry.body),
        entry.body,
    )


def damaged(path: Path, error: sqlite3.Error) -> RunFolderError:
    """Return an error that says which file cannot be used, why, and what to do."""
    cure = "free disk space, and check the permissions of the file and its folder"
    if not isinstance(error, sqlite3.OperationalError):
        cure = "restore the file, or move it away; without it the run loses its records"
    return RunFolderError(f"the exchange's file cannot be used ({error})", where=str(path), cure=cure)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
