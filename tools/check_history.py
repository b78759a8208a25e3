#!/usr/bin/env python3
"""Check of a run's written history, for those who doubt a run: its leases of units, and its exchange's file.

    .venv/bin/python tools/check_history.py RUN_FOLDER...

units.jsonl          a unit goes from owner to owner by the lawful steps alone: no lease but of a free unit, under an
                     epoch above all before it; a later allocator takes over only what an earlier one had granted
exchange.sqlite      no record has been stored twice; of every policy as many records are held as were stored and not
                     removed; no run epoch goes on below the step at which a resume opened it

Reads finished runs and running ones. Exit code 1 when a history cannot have happened. Ends with one line of JSON.
"""

import argparse
import json
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mrl.allocation.allocation_limits import EPOCHS_PER_LIFE

STEPS = {
    "free": {"granted"},
    "granted": {"active", "draining", "clearing"},
    "active": {"draining", "clearing"},
    "draining": {"clearing"},
    "clearing": {"free", "dead", "granted"},
    "dead": {"free"},
}
"""State of a lease -> states that may follow. An allocator begins with all units in "clearing", and may adopt some."""
STORED_TWICE = (
    "SELECT record_id, count(*) FROM (SELECT record_id FROM records UNION ALL SELECT record_id FROM removed) "
    "GROUP BY record_id HAVING count(*) > 1"
)
UNBALANCED = (
    "SELECT policy, sum(CASE what WHEN 'stored' THEN records WHEN 'removed' THEN -records ELSE 0 END) AS kept, "
    "(SELECT count(*) FROM records WHERE source = policy) AS held FROM counts GROUP BY policy HAVING kept <> held"
)
BELOW_RESUME = (
    "SELECT later.policy, later.run_epoch, later.step, resume.step FROM versions AS later JOIN versions AS resume "
    "USING (policy, run_epoch) WHERE resume.resumed = 1 AND later.resumed = 0 AND later.step < resume.step"
)


def lease_faults(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Find impossible steps among the transitions of units, oldest first."""
    owners: dict[tuple[str, int], str] = {}
    newest: dict[str, int] = {}
    states: dict[str, tuple[int, str]] = {}
    life = 0
    for row in rows:
        unit, epoch, state, policy = row["unit"], row["epoch"], row["state"], row["policy"]
        # The last lines of a killed allocator may be missing: the next allocator begins anew.
        is_adopted = state == "granted" and row["why"] == "of an earlier allocator"
        life = max(life, 0 if is_adopted else epoch // EPOCHS_PER_LIFE)
        of_life, before = states.get(unit, (0, "clearing"))
        may_be_new = of_life != life or is_adopted
        if state not in STEPS[before] and not (may_be_new and state in STEPS["clearing"]):
            yield f"{unit}: {before} became {state} under epoch {epoch}"
        if is_adopted and owners.get((unit, epoch), policy) != policy:
            yield f"{unit}: epoch {epoch} of {owners[unit, epoch]} was taken over for {policy}"
        elif state == "granted" and not is_adopted:
            if epoch <= newest.get(unit, 0):
                yield f"{unit}: granted to {policy} under epoch {epoch} after {newest[unit]}"
            owners[unit, epoch] = policy
            newest[unit] = epoch
        states[unit] = (life, state)


def store_faults(path: Path) -> Iterator[str]:
    """Find impossible contents of an exchange's file."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        yield from (f"{record_id} was stored {times} times" for record_id, times in connection.execute(STORED_TWICE))
        for policy, kept, held in connection.execute(UNBALANCED):
            yield f"{policy}: {held} records are held, by the counts it is {kept}"
        for policy, epoch, step, resumed in connection.execute(BELOW_RESUME):
            yield f"{policy}: run epoch {epoch} was opened at step {resumed} and is at {step}"
    finally:
        connection.close()


def faults_of(run: Path) -> list[str]:
    """Find everything impossible in a run's folder."""
    found: list[str] = []
    units, store = run / "units.jsonl", run / "exchange/exchange.sqlite"
    if units.exists():
        *whole, _torn = units.read_bytes().split(b"\n")
        found += lease_faults(map(json.loads, whole))
    if store.exists():
        found += store_faults(store)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    found = {str(run): faults_of(run) for run in parser.parse_args().runs}
    for run, faults in found.items():
        for fault in faults:
            print(f"{run}: {fault}")
    print(json.dumps({run: len(faults) for run, faults in found.items()}))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
