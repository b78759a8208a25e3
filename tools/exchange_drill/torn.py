"""Torn-log drill: the write-ahead log of the daemon's file is cut and spoiled at many places, and opened again."""

import random
import shutil
import time
from pathlib import Path

from exchange_drill.faults import Settings
from exchange_drill.outcome import Outcome
from exchange_drill.part import connect
from exchange_drill.rig import Rig, opened
from exchange_drill.workload import make_record, record_id
from mrl.exchange.limits import Limits
from mrl.exchange.store import FILE, Store

NUM_RECORDS = 40
NUM_CUTS = 60
FLUSH_S = 10.0
WAL = f"{FILE}-wal"


def torn_log(folder: Path, settings: Settings) -> Outcome:
    """Check that the records left by a damaged log are the first ones of those acknowledged."""
    outcome = Outcome("write-ahead log cut or spoiled")
    _write(folder, outcome)
    rng = random.Random(settings.seed)
    main, log = (folder / "exchange" / FILE).read_bytes(), (folder / "exchange" / WAL).read_bytes()
    whole = _held(folder, main, log, outcome)
    outcome.lost += NUM_RECORDS - len(whole)
    for number in range(NUM_CUTS):
        place = rng.randrange(len(log))
        torn = log[:place] if number % 2 else log[:place] + bytes([log[place] ^ 0xFF]) + log[place + 1 :]
        held = _held(folder, main, torn, outcome)
        outcome.tried += 1
        if held != whole[: len(held)]:
            outcome.failures.append(f"what is left of {'a cut' if number % 2 else 'a spoiled'} log is no beginning")
    return outcome


def _write(folder: Path, outcome: Outcome) -> None:
    """Let a daemon take some records, one by one, and kill it."""
    with opened(Rig(folder, num_producers=0)) as rig:
        rig.start_daemon()
        client = connect(folder, "worker/qwen/0", over_tcp=True)
        for number in range(NUM_RECORDS):
            client.publish([make_record(0, number)])
            if not client.flush(FLUSH_S):
                raise RuntimeError(f"a record was not acknowledged: {client.counts}")
        rig.daemon.kill()
        client.close(0.0)
    outcome.acknowledged = NUM_RECORDS


def _held(folder: Path, main: bytes, log: bytes, outcome: Outcome) -> list[str]:
    """Ids of the records that a daemon finds in these files."""
    run = folder / "torn"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    (run / FILE).write_bytes(main)
    (run / WAL).write_bytes(log)
    began_s = time.monotonic()
    store = Store(run, Limits(durability="written"))
    try:
        found = [entry.record_id for entry in store.contents().entries]
    finally:
        store.close()
    outcome.recoveries_s.append(time.monotonic() - began_s)
    assert found == [record_id(0, number) for number in range(len(found))], found
    return found
