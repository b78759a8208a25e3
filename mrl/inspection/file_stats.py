"""The account of a run's exchange from its file, by SELECT: for when no daemon answers, and for a finished run."""

import sqlite3
from pathlib import Path
from typing import Any

from mrl.exchange.archive import open_file
from mrl.exchange.store import FILE
from mrl.records.exchange_messages import PolicyStat, Stat
from mrl.records.version import Version

SERVED = "served"
HELD = """
    SELECT source, kind, count(*), count(DISTINCT prompt_id), sum(length(body)), min(oldest_step) FROM records
    GROUP BY source, kind ORDER BY source, kind
"""
NEWEST = """
    SELECT policy, run_epoch, max(step) FROM versions AS v
    WHERE run_epoch = (SELECT max(run_epoch) FROM versions WHERE policy = v.policy) GROUP BY policy
"""


def stat_of(folder: Path) -> Stat:
    """Return the account of an exchange as far as its file tells. Raises RunFolderError where there is none."""
    connection = open_file(folder)
    try:
        policies = _policies(connection)
    finally:
        connection.close()
    files = (folder / FILE, folder / f"{FILE}-wal")
    return Stat(
        incarnation="none",
        uptime_s=0.0,
        budget_bytes=0,
        used_bytes=sum(policy_stat.bytes for policy_stat in policies),
        clients=[],
        malformed={},
        policies=policies,
        flows=[],
        file_bytes=sum(path.stat().st_size for path in files if path.exists()),
    )


def find(folder: Path, record_id: str) -> tuple[bytes, str] | None:
    """Return a record and its place, or b"" and why it was removed; None where the file does not know its id."""
    connection = open_file(folder)
    try:
        held = "SELECT number, body FROM records WHERE record_id = ?"
        for number, body in connection.execute(held, (record_id,)):
            return body, f"number {number} in {folder / FILE}"
        gone = "SELECT number, reason FROM removed WHERE record_id = ? ORDER BY place DESC LIMIT 1"
        for number, reason in connection.execute(gone, (record_id,)):
            return b"", f"record number {number} was removed: {reason}"
    finally:
        connection.close()
    return None


def _policies(connection: sqlite3.Connection) -> list[PolicyStat]:
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for policy, what, reason, number in connection.execute("SELECT policy, what, reason, records FROM counts"):
        counts.setdefault(policy, {}).setdefault(what, {})[reason] = number
    rows: dict[str, list[Any]] = {}
    for source, *row in connection.execute(HELD):
        rows.setdefault(source, []).append(row)
    prompts = dict(connection.execute("SELECT source, count(DISTINCT prompt_id) FROM records GROUP BY source"))
    newest = {policy: Version(epoch, step) for policy, epoch, step in connection.execute(NEWEST)}
    return [
        _policy_stat(policy, rows.get(policy, []), prompts.get(policy, 0), newest.get(policy), counts.get(policy, {}))
        for policy in sorted({*counts, *rows, *newest})
    ]


def _policy_stat(
    policy: str, rows: list[Any], prompts: int, newest: Version | None, counts: dict[str, dict[str, int]]
) -> PolicyStat:
    oldest_step = min((row[4] for row in rows), default=0)
    removed = counts.get("removed", {})
    return PolicyStat(
        policy=policy,
        newest=newest,
        prompts=prompts,
        records=sum(row[1] for row in rows),
        bytes=sum(row[3] for row in rows),
        put=counts.get("stored", {}).get("", 0),
        refused=counts.get("refused", {}),
        evicted={reason: number for reason, number in removed.items() if reason != SERVED},
        watched_prompts=0,
        kinds={row[0]: row[1] for row in rows},
        oldest_age_versions=max(0, newest.step - oldest_step) if newest and rows else 0,
    )
