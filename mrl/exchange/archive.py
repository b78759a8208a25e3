"""The records in an exchange's file, for anybody: of a finished run, of one that goes on, of another run."""

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from mrl.errors import RecordError, RunFolderError
from mrl.exchange.store import FILE, damaged
from mrl.records.codec import decode
from mrl.records.experience import ExperienceRecord, RecordKind, experience_decoder

__all__ = ["open_file", "read_records"]

ROWS_OF_A_PART = 64
"""In memory, of what is read."""


def open_file(path: Path, *, has_ended: bool = False) -> sqlite3.Connection:
    """The file, or that in the exchange's folder, to read from; a daemon may go on writing to it.

    Once the run `has_ended` nothing is written beside the file, unless a write-ahead log was left there, which SQLite
    reads by means of a second file. Raises RunFolderError where there is none.
    """
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise RunFolderError("no file of an exchange", where=str(path), cure="name runs/<name>/exchange")
    log = path.with_name(f"{path.name}-wal")
    is_whole = has_ended and not (log.is_file() and log.stat().st_size)
    how = "mode=ro&immutable=1" if is_whole else "mode=ro"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)


def read_records(
    path: Path, *, kinds: Sequence[RecordKind] = (), sources: Sequence[str] = ()
) -> Iterator[ExperienceRecord]:
    """Records in the order in which they came, of these kinds and sources (empty: of all); others are left out.

    As long as a reader has the file open at one moment, its write-ahead log can only grow. So the file is read in small
    parts, and what is done between two records may take any time: of a run that goes on, records that leave meanwhile
    are left out, and so are those that come.
    Raises RunFolderError where there is no such file or it is damaged. What is no valid record is left out.
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
