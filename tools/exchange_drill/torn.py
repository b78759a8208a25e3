"""A log whose last entry was written in part: cut at each of its bytes, and read again."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from exchange_drill.faults import Settings
from exchange_drill.outcome import Outcome
from exchange_drill.part import connect
from exchange_drill.rig import Rig, opened
from exchange_drill.workload import make_record
from mrl.exchange.daemon import ExchangeDaemon, Limits
from mrl.transport.keys import load_keys

NUM_RECORDS = 4
FLUSH_S = 10.0


def torn_tail(folder: Path, settings: Settings) -> Outcome:
    """Everything before the last entry is there, nothing of the last one is, and the daemon serves."""
    outcome = Outcome("torn tail, at every byte of the last entry")
    sizes = _write(folder, outcome)
    [segment] = (folder / "exchange").glob("*.segment")
    content = segment.read_bytes()
    for length in range(sizes[-2], sizes[-1] + 1):
        held, cut_bytes, opened_s = _open_cut(folder, segment.name, content[:length])
        is_whole = length == sizes[-1]
        outcome.lost += max(0, NUM_RECORDS - (not is_whole) - held)
        outcome.doubled += max(0, held - NUM_RECORDS + (not is_whole))
        outcome.recoveries_s.append(opened_s)
        outcome.tried += 1
        if cut_bytes != (0 if is_whole else length - sizes[-2]):
            outcome.failures.append(f"of {length - sizes[-2]} torn bytes {cut_bytes} were cut")
    return outcome


def _write(folder: Path, outcome: Outcome) -> Sequence[int]:
    """A daemon takes some records and is killed; returns the length of its log after each."""
    sizes = []
    with opened(Rig(folder, num_producers=0)) as rig:
        rig.start_daemon()
        client = connect(folder, "worker/qwen/0", over_tcp=True)
        for number in range(NUM_RECORDS):
            client.publish([make_record(0, number)])
            if not client.flush(FLUSH_S):
                raise RuntimeError(f"a record was not acknowledged: {client.counts}")
            sizes.append(sum(path.stat().st_size for path in (folder / "exchange").glob("*.segment")))
        rig.daemon.kill()
        client.close(0.0)
    outcome.acknowledged = NUM_RECORDS
    return sizes


def _open_cut(folder: Path, name: str, content: bytes) -> tuple[int, int, float]:
    """(records held, bytes cut off, seconds) of a daemon that finds this log."""
    run = folder / "cut"
    shutil.rmtree(run, ignore_errors=True)
    (run / "exchange").mkdir(parents=True)
    (run / "exchange" / name).write_bytes(content)
    began_s = time.monotonic()
    daemon = ExchangeDaemon(
        run / "exchange",
        run / "endpoints",
        load_keys(folder / "keys"),
        host="127.0.0.1",
        port=0,
        limits=Limits(durability="written"),
        clock=time.monotonic,
    )
    try:
        return len(daemon.core.shelf), daemon.log.cut_bytes, time.monotonic() - began_s
    finally:
        daemon.close()
