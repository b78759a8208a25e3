#!/usr/bin/env python3
"""Coverage-guided fuzzing of the exchange's core, for those who change it: no message of a client breaks the core.

    .venv/bin/python tools/fuzz_exchange.py [--seconds 600] [--corpus PATH] [--keep PATH]

Whatever clients say, the core answers or drops it, and stays within its bounds. Fuzzing begins with one conversation of
every sort and with the corpus, changes values and messages, and keeps inputs that reach new code.
`exchange_drill.stage` checks the laws that hold after every message. --keep writes the shortest inputs that together
reach as much code. The first input that breaks a law is written to the working folder, its traceback to the output, and
the exit code is not 0; `--replay FILE` plays it again. Needs atheris, which has wheels for some versions of Python
only: .venv/bin/pip install -e '.[fuzz]'
"""

import argparse
import hashlib
import importlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "exchange" / "corpus"
PACKAGE = f"{os.sep}mrl{os.sep}"
MAX_INPUT_BYTES = 16_384
MEMORY_MB = 1024
INPUT_S = 10
MUTATED_BY_US = 0.7
"""Share of the mutations made by `exchange_drill.seeds`, which knows messages; libFuzzer's know bytes only."""

Step = tuple[CodeType, int, int]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzzing of the exchange's core.")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help=f"inputs to begin with (default: {CORPUS})")
    parser.add_argument("--keep", type=Path, help="folder for the shortest inputs that reach as much")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="play one input and do nothing else")
    parser.add_argument("--libfuzzer", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def fuzz(words: list[str]) -> None:
    """Hand over to libFuzzer, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["mrl"]):
        stage = importlib.import_module("exchange_drill.stage")
        seeds = importlib.import_module("exchange_drill.seeds")

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < MUTATED_BY_US:
            changed: bytes = seeds.mutated(data, rng)
            if len(changed) <= max_size:
                return changed
        found: bytes = atheris.Mutate(data, max_size)
        return found

    atheris.Setup([sys.argv[0], *words], stage.play, custom_mutator=mutator)
    atheris.Fuzz()


def child(*words: str) -> int:
    """Run libFuzzer in a process of its own; return its exit code."""
    argv = [sys.executable, __file__, "--libfuzzer", *(word.removeprefix("-") for word in words)]
    return subprocess.run(argv, check=False).returncode


def main() -> int:
    asked = arguments()
    if asked.libfuzzer is not None:
        fuzz([word if "/" in word.partition("=")[0] else f"-{word}" for word in asked.libfuzzer])
        return 0
    if asked.replay is not None:
        importlib.import_module("exchange_drill.stage").play(asked.replay.read_bytes())
        return 0
    limits = (f"-max_len={MAX_INPUT_BYTES}", f"-rss_limit_mb={MEMORY_MB}", f"-timeout={INPUT_S}")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as found:
        for name, data in importlib.import_module("exchange_drill.seeds").conversations().items():
            (Path(found) / name).write_bytes(data)
        code = child(*limits, f"-max_total_time={asked.seconds}", found, str(asked.corpus))
        if asked.keep is not None and code == 0:
            keep(asked.keep, [path for folder in (asked.corpus, Path(found)) for path in folder.iterdir()])
    return code


def keep(folder: Path, paths: Sequence[Path]) -> None:
    """Write the shortest of these inputs that together reach all steps that any of them reaches."""
    folder.mkdir(parents=True, exist_ok=True)
    known: set[Step] = set()
    for data in sorted({path.read_bytes() for path in paths}, key=lambda data: (len(data), data)):
        if new := steps_of(data) - known:
            known |= new
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def steps_of(data: bytes) -> set[Step]:
    """Return the steps of an input: pairs of lines of the package that follow each other in one function."""
    play = importlib.import_module("exchange_drill.stage").play
    steps: set[Step] = set()

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if PACKAGE not in frame.f_code.co_filename:
            return None
        line = frame.f_lineno

        def trace_lines(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            nonlocal line
            steps.add((frame.f_code, line, frame.f_lineno))
            line = frame.f_lineno
            return trace_lines

        return trace_lines

    sys.settrace(trace)
    try:
        play(data)
    finally:
        sys.settrace(None)
    return steps


if __name__ == "__main__":
    sys.exit(main())
