"""Writers whose disk fails: `python -m tests.support.faulty_writers WHAT FOLDER FIRST_SEED NUM_SEEDS`.

A process is forked for every seed. The numbers of the records or steps that it was told are safe are written beside, to
`told-FOLDER/SEED`, one a line.
"""

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from mrl.errors import MRLError
from mrl.exchange.limits import Limits
from mrl.exchange.record_index import Entry
from mrl.exchange.store import Store
from mrl.exchange.transaction import Judged, Transaction
from mrl.records.codec import encode
from mrl.records.experience import OutcomeRecord
from mrl.records.tags import tags_of
from tests.support.successes import success

ONE_IN = 40
"""Number of calls of which one fails."""


def record(number: int) -> OutcomeRecord:
    """Make the record with this number, long enough for several pages."""
    return success(f"r{number}", "a", "p", 1, completion=bytes([number % 251]) * 50_000)


def write_store(folder: Path, acknowledge: Callable[[int], object]) -> None:
    """Commit records until the disk is broken."""
    store = Store(folder, Limits())
    for number in range(1, 61):
        body = encode(record(number))
        entry = Entry(number, tags_of(body), body)
        done = Transaction(puts=[Judged(b"w", "a", number, 1, Counter())], inserts=[entry])
        if store.commit(done) == "":
            acknowledge(number)
        store.checkpoint(is_idle=True)


def write_checkpoints(folder: Path, acknowledge: Callable[[int], object]) -> None:
    """Save checkpoints until the disk fails."""
    import torch

    from mrl.weights.checkpoint_store import CheckpointStore
    from mrl.weights.tensor_pieces import held_piece

    store = CheckpointStore(folder, "a", keep=8)
    for step in range(1, 9):
        tensors = {f"w{n}": torch.full((64, 300), float(step + n)) for n in range(3)}
        store.write_pieces(step, {name: held_piece(one, 0) for name, one in tensors.items()}, rank=0, life=0)
        store.complete(step, msgspec.json.encode({"step": step}), life=0)
        acknowledge(step)


def main(what: str, folder: Path, first: int, count: int) -> None:
    """Run one writer after the other, each in a process."""
    writer = {"store": write_store, "checkpoints": write_checkpoints}[what]
    if what == "checkpoints":  # once, before any process is forked
        import torch

        import mrl.weights.checkpoint_store
        import mrl.weights.tensor_pieces  # noqa: F401

        torch.set_num_threads(1)
    told = folder.with_name(f"told-{folder.name}")
    told.mkdir()
    faults = ctypes.CDLL(None).fault_begin
    faults.argtypes = [ctypes.c_ulong, ctypes.c_int]
    for seed in range(first, first + count):
        pid = os.fork()
        if not pid:
            file = os.open(told / str(seed), os.O_WRONLY | os.O_CREAT)
            (folder / str(seed)).mkdir(parents=True)
            faults(seed, ONE_IN)
            try:
                writer(folder / str(seed), lambda number, file=file: os.write(file, b"%d\n" % number))
            except (OSError, MRLError):
                os._exit(3)
            except BaseException as error:  # noqa: BLE001 - reported as it is
                os.write(2, f"seed {seed}: {error!r}\n".encode())
                os._exit(4)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
