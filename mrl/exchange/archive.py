"""The records in an exchange's file, for anybody: of a finished run, of one that goes on, of another run."""

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from mrl.errors import RecordError, RunFolderError
from mrl.exchange.store import FILE, damaged
from mrl.records.codec import decode
from mrl.records.experience import ExperienceRecord, RecordKind, experience_decoder

__all__ = ["open_file", "read_records"]


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

    Raises RunFolderError where there is no such file or it is damaged. What is no valid record is left out.
    """
    conditions = [f"{name} IN ({','.join('?' * len(of))})" for name, of in (("kind", kinds), ("source", sources)) if of]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    connection = open_file(path)
    try:
        for (body,) in connection.execute(f"SELECT body FROM records{where} ORDER BY number", [*kinds, *sources]):
            try:
                yield decode(body, experience_decoder)
            except RecordError:
                continue
    except sqlite3.Error as error:
        raise damaged(path, error) from error
    finally:
        connection.close()
