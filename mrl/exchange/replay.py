"""Replay: this run's exchange takes over the records of a run that ended, under sources that stand still.

    old file ──▶ newest records within the budget ──▶ renamed, at version 0.0 ──▶ one transaction ──▶ own file

A replayed source never announces a version, and all its records are of one version, 0.0. Their age is 0 for as long as
the run lasts, so that no bound on ages refuses them. The age that a record had when its run ended is checked once,
here. All else that a source said, log-probabilities included, stays as it was when it was sampled.

The old file is opened to read, and is left as it is. The own file counts the replayed records in the transaction that
stores them, so that a daemon that starts again does not take them over twice.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from mrl.errors import RecordError, RunFolderError
from mrl.exchange.archive import open_file
from mrl.exchange.contents import Contents
from mrl.exchange.limits import Limits, held_bytes_of
from mrl.exchange.record_index import Entry
from mrl.exchange.store import APPLICATION_ID, SCHEMA_VERSION, Store, damaged
from mrl.exchange.transaction import Transaction
from mrl.records.codec import decode, encode
from mrl.records.experience import RecordKind, experience_decoder
from mrl.records.tags import tags_of
from mrl.records.version import Version

KINDS: tuple[RecordKind, ...] = ("outcome", "episode", "rollout", "value")
"""Kinds that are of use without the policy that made them. Scores answer requests, and a run that ended gets none."""
STANDING = Version(0, 0)
"""The one version of a replayed source."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Which records of another run's file are taken over."""

    folder: Path
    """Exchange folder of the run that ended."""
    sources: Mapping[str, str]
    """Policy of that run -> name of its source in this run."""
    max_age_versions: int | None = None
    """Greatest age that a record may have had when that run ended; None takes any."""


class Replayed(NamedTuple):
    """Numbers of records that a replay took over and left out."""

    num_held: int
    """Records that were taken over."""
    num_left_out: int
    """Older records for which the budget has no room."""
    num_unreadable: int
    """Rows that hold no record of this version of mrl."""


class Shared(NamedTuple):
    """The prompts on which a file has records of one policy and kind."""

    source: str
    kind: str
    prompt_ids: frozenset[str]


def shared_in(folder: Path) -> list[Shared]:
    """Return which prompts the policies of a run that ended have shared records on, of the kinds that can be replayed.

    Raises RunFolderError where there is no such file, or it cannot be used.
    """
    query = f"SELECT DISTINCT source, kind, prompt_id FROM records WHERE {_any_of('kind', KINDS)}"
    prompt_ids: dict[tuple[str, str], set[str]] = {}
    try:
        with closing(_open(folder)) as connection:
            for source, kind, prompt_id in connection.execute(query, KINDS):
                prompt_ids.setdefault((source, kind), set()).add(prompt_id)
    except sqlite3.Error as error:
        raise damaged(folder, error) from error
    return [Shared(*key, frozenset(ids)) for key, ids in sorted(prompt_ids.items())]


def take_over(store: Store, contents: Contents, replay: Replay, limits: Limits) -> tuple[Contents, Replayed | None]:
    """Commit the replayed records to the store. Returns the contents with them, and their numbers.

    Where the store has them already, returns the contents as they are, and None. Raises RunFolderError where the old
    file cannot be used or has nothing to replay, and where the own one has no room.
    """
    names = set(replay.sources.values())
    if any(what == "stored" and policy in names for policy, what, _ in contents.counts):
        return contents, None
    entries, left_out, unreadable = _newest(replay, contents.last_number, limits)
    if not entries:
        found = f"{unreadable} unreadable rows" if unreadable else "none within the limits of age and memory"
        raise RunFolderError("no records that can be replayed", where=str(replay.folder), got=found)
    transaction = Transaction(inserts=entries)
    if failure := store.commit(transaction):
        raise RunFolderError(f"the replayed records could not be stored ({failure})", where=str(store.path))
    counts = Counter(dict(contents.counts)) + transaction.counts()
    after = replace(contents, entries=[*contents.entries, *entries], counts=counts, last_number=entries[-1].number)
    return after, Replayed(len(entries), left_out, unreadable)


def _newest(replay: Replay, last_number: int, limits: Limits) -> tuple[list[Entry], int, int]:
    """Return the newest records within the budget, oldest first, and the numbers of older and of unreadable ones."""
    found: list[Entry] = []
    used_bytes = num_left_out = num_unreadable = 0
    for source, body in _bodies(replay):
        renamed = _renamed(body, replay.sources[source])
        tags = tags_of(renamed) if renamed else None
        if tags is None:
            num_unreadable += 1
            continue
        used_bytes += held_bytes_of(len(renamed))
        if used_bytes > limits.budget_bytes:
            num_left_out += 1
            continue
        found.append(Entry(0, tags, renamed))
    found.reverse()
    for place, entry in enumerate(found, last_number + 1):
        entry.number = place
    return found, num_left_out, num_unreadable


def _bodies(replay: Replay) -> Iterator[tuple[str, bytes]]:
    """Yield (policy in the old run, record), the newest versions first."""
    names = tuple(replay.sources)
    query = (
        f"SELECT source, oldest_step, body FROM records WHERE {_any_of('kind', KINDS)} AND {_any_of('source', names)}"
        " ORDER BY oldest_step DESC, number DESC"
    )
    try:
        with closing(_open(replay.folder)) as connection:
            ends = dict(connection.execute("SELECT policy, step FROM versions ORDER BY run_epoch, step"))
            for source, oldest_step, body in connection.execute(query, (*KINDS, *names)):
                age = max(0, ends.get(source, oldest_step) - oldest_step)
                if replay.max_age_versions is None or age <= replay.max_age_versions:
                    yield source, body
    except sqlite3.Error as error:
        raise damaged(replay.folder, error) from error


def _renamed(body: bytes, source: str) -> bytes:
    """Return the record as one of `source`; empty where it is no record."""
    try:
        record = decode(body, experience_decoder)
    except RecordError:
        return b""
    record_id = f"{source}/{record.record_id}"
    return encode(msgspec.structs.replace(record, source=source, record_id=record_id, oldest=STANDING, newest=STANDING))


def _open(folder: Path) -> sqlite3.Connection:
    """Open the old file to read. Raises RunFolderError where there is none, or its schema is another version's."""
    connection = open_file(folder, has_ended=True)
    found = tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if found == (APPLICATION_ID, SCHEMA_VERSION):
        return connection
    connection.close()
    raise RunFolderError(
        "the records were written by another version of mrl",
        where=str(folder),
        got=f"schema {found[1]}",
        wanted=f"schema {SCHEMA_VERSION}",
        cure="remove sharing.replay",
    )


def _any_of(column: str, values: Sequence[str]) -> str:
    return f"{column} IN ({','.join('?' * len(values))})"
