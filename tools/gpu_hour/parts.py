"""Parts of a stage, each in a process of its own: one that fails, hangs or breaks its GPU context harms no other."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from gpu_hour.bench import Bench, SkippedError
from mrl.parent_death import die_with_parent

STAGE_S = {"cuda": 520.0, "cpu": 1800.0}
"""Seconds of a stage by device: on a GPU a command limited to ten minutes ends in time; on a CPU a bound on hangs."""
LEAST_S = 5.0
"""Seconds that must be left to begin a part."""
MAX_SAID_CHARS = 400
IN_MEMORY_BYTES = 32 * 1024**3
"""Free bytes of /dev/shm above which a stage's files go there."""

Part = Callable[[Bench], None]
Outcome = dict[str, str]
"""Outcome of a part: `status` (done, skipped or failed) and `why`."""


def run_stage(stage: str, parts: Mapping[str, Part], bench: Bench) -> bool:
    """Run a stage's parts in order; the last line says how it ended. Return whether none failed."""
    began_s = time.monotonic()
    counts = dict.fromkeys(("done", "skipped", "failed"), 0)
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix=f"gpu-hour-{stage}-", dir=_in_memory()) as scratch:
        at = replace(bench, stage=stage, scratch=Path(scratch), ends_at_s=began_s + STAGE_S[bench.device])
        for name, part in parts.items():
            part_began_s = time.monotonic()
            outcome = _in_a_process(replace(at, part=name), part)
            counts[outcome["status"]] += 1
            failed += [f"{name}: {outcome['why']}"] if outcome["status"] == "failed" else []
            at.write({"part": name, **outcome, "seconds": round(time.monotonic() - part_began_s, 1)})
    told = "; ".join(failed) or ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    seconds = round(time.monotonic() - began_s, 1)
    bench = replace(bench, stage=stage)
    bench.write({"status": "failed" if failed else "done", "why": told, "seconds": seconds})
    return not failed


def asked(part: Callable[[], str]) -> str:
    """Return a function's answer from a process of its own, so that this one never opens the GPU and can be forked."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: sender.send_bytes(part().encode()))
    process.start()
    sender.close()
    with suppress(EOFError):
        return receiver.recv_bytes().decode()
    return ""


def _in_memory() -> str | None:
    """Folder in main memory, where runs of one host keep their weights best; None where it is small."""
    shared = Path("/dev/shm")
    is_large = shared.is_dir() and shutil.disk_usage(shared).free > IN_MEMORY_BYTES
    return str(shared) if is_large else None


def _in_a_process(bench: Bench, part: Part) -> Outcome:
    if bench.left_s < LEAST_S:
        return {"status": "skipped", "why": "the stage's time is used up"}
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_work, args=(bench, part, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(bench.left_s):
            return {"status": "failed", "why": "not done when the stage's time was used up"}
        outcome: Outcome = json.loads(receiver.recv_bytes())
        process.join(max(LEAST_S, bench.left_s))
        return outcome
    except EOFError:
        process.join()
        return {"status": "failed", "why": f"its process ended with {process.exitcode}"}
    finally:
        with suppress(ProcessLookupError):  # the part, and whatever it started
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _work(bench: Bench, part: Part, sender: Connection) -> None:
    """Run a part in the child process; the output of the part and of its libraries goes to a file."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    with (bench.folder / f"{bench.stage}.log").open("ab", buffering=0) as log:
        log.write(f"--- {bench.stage}/{bench.part}\n".encode())
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        part(bench)
        outcome = {"status": "done", "why": ""}
    except SkippedError as skipped:
        outcome = {"status": "skipped", "why": str(skipped)}
    except BaseException as error:  # noqa: BLE001 the outer edge of this process
        traceback.print_exc()
        outcome = {
            "status": "failed",
            "why": f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_SAID_CHARS]}",
        }
    sys.stdout.flush()
    sender.send_bytes(json.dumps(outcome).encode())
