"""Verifiers that misbehave on demand; imported by verifier processes, by this name, through PYTHONPATH."""

import os
import re
import time
from pathlib import Path


def by_text(reference: str, answer: str) -> float | None:
    """Do as the answer says: hang in Python, hang in C, sleep, die, leave, eat memory, raise, speak; else compare."""
    if answer in ("loop", "sleep") and "HANGING" in os.environ:
        Path(os.environ["HANGING"]).write_text("now")  # a pipe, whose reader learns that the hanging begins
    if answer == "loop":
        while True:
            pass
    if answer == "regex":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if answer == "sleep":
        time.sleep(1000)
    if answer == "die":
        os._exit(3)
    if answer == "leave":
        raise SystemExit(4)
    if answer == "nothing":
        return None
    if answer == "nan":
        return float("nan")
    if answer == "eat":
        return float(len([bytearray(64 * 1024 * 1024) for _ in range(1000)]))
    if answer == "raise":
        raise RuntimeError("cannot be")
    if answer == "speak":
        print("this goes to no reply", flush=True)
    if answer == "pid":
        return float(os.getpid())
    return float(answer == reference)
