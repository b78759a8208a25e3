"""Reader of the records in an exchange's file, without a daemon: of a run that goes on, or of one that has ended."""

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from mrl.errors import RecordError, RunFolderError
from mrl.exchange.store import FILE, damaged
from mrl.records.codec import decode
from mrl.records.experience import ExperienceRecord, RecordKind, experience_decoder

__all__ = ["open_file", "read_records"]

ROWS_OF_A_PART = 64
"""Rows that one query reads, and that are in memory at once."""


def open_file(path: Path, *, has_ended: bool = False) -> sqlite3.Connection:
    """Return a read-only connection to `path`, or to the file in the exchange's folder `path`.

    A daemon may go on writing to the file. Once the run `has_ended`, nothing is written beside the file, unless a
    write-ahead log was left there, which SQLite reads by means of a second file. Raises RunFolderError where there is
    no such file.
    """
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise RunFolderError("no exchange file found", where=str(path), cure="give the folder runs/<name>/exchange")
    log = path.with_name(f"{path.name}-wal")
    is_whole = has_ended and not (log.is_file() and log.stat().st_size)
    how = "mode=ro&immutable=1" if is_whole else "mode=ro"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)


def read_records(
    path: Path, *, kinds: Sequence[RecordKind] = (), sources: Sequence[str] = ()
) -> Iterator[ExperienceRecord]:
    """Yield the records of these kinds and sources in order of arrival. An empty sequence stands for all.

    While a reader has a query open, the write-ahead log can only grow. So each query reads a small part of the file,
    and the caller may take any time between two records. Of a run that goes on, records that arrive after the first
    query are left out, and so are those that are removed before they are read. A row that holds no valid record is left
    out. Raises RunFolderError where there is no such file or it is damaged.
    """
    wanted = (("kind", kinds), ("source", sources))
    conditions = "".join(f" AND {name} IN ({','.join('?' * len(of))})" for name, of in wanted if of)
    query = f"SELECT number, body FROM records WHERE number > ? AND number <= ?{conditions} ORDER BY number LIMIT ?"
    connection = open_file(path)
    try:
        [(last,)] = connection.execute("SELECT coalesce(max(number), 0) FROM records")
        number = 0
        while rows := connection.execute(query, [number, last, *kinds, *sources, ROWS_OF_A_PART]).fetchall():
            number = rows[-1][0]
            for _, body in rows:
                try:
                    yield decode(body, experience_decoder)
                except RecordError:
                    continue
    except sqlite3.Error as error:
        raise damaged(path, error) from error
    finally:
        connection.close()
