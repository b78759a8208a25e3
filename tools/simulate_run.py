#!/usr/bin/env python3
"""Whole runs in virtual time, for those who change mrl: faults are drawn from a seed, laws are checked at every event.

    .venv/bin/python tools/simulate_run.py [--seeds N] [--first-seed N] [--seed K [--trace]]
        [--planted NAME | all] [--workers N]

A failing seed is printed with the command that plays it again. With --planted a mistake is put into the real code
first: then the first seed that finds it is printed, and exit code 1 says that none did. Otherwise exit code 1 says that
some seed failed. Ends with one line of JSON.
"""

import argparse
import json
import resource
import sys
import time
from collections import Counter
from multiprocessing import Pool

from run_simulation.planted import PLANTED, plant
from run_simulation.trial import Verdict, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play this seed alone")
    parser.add_argument("--trace", action="store_true", help="tell the whole story of --seed")
    parser.add_argument("--planted", choices=["all", *PLANTED])
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    args = parser.parse_args()
    if args.planted:
        names = list(PLANTED) if args.planted == "all" else [args.planted]
        return int([found(name, args.first_seed, args.seeds) for name in names].count(False) > 0)
    if args.seed is not None:
        verdict = simulate(args.seed, trace=print if args.trace else None)
        print(f"seed {args.seed}: {verdict.violation or 'nothing found'}, digest {verdict.digest}, {verdict.counts}")
        return int(bool(verdict.violation))
    return play(range(args.first_seed, args.first_seed + args.seeds), args.workers)


def play(seeds: range, num_workers: int) -> int:
    """Simulate many seeds; print failing ones as they are found. Return the exit code."""
    begin_s, failed, counts, num_events = time.monotonic(), list[int](), Counter[str](), 0
    with Pool(num_workers) as pool:
        for verdict in pool.imap_unordered(simulate, seeds, chunksize=4):
            counts.update(verdict.counts)
            num_events += verdict.num_events
            if verdict.violation:
                failed.append(verdict.seed)
                tell(verdict)
        pool.close()
        pool.join()
    took_s, cpu_s = time.monotonic() - begin_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    line = {"seeds": len(seeds), "failed": sorted(failed), "events": num_events}
    print(json.dumps(line | {"took_s": round(took_s, 1), "cpu_s": round(cpu_s, 1), **counts}))
    return int(bool(failed))


def found(name: str, first_seed: int, num_seeds: int) -> bool:
    """Whether some seed finds a planted mistake."""
    with plant(name):
        for seed in range(first_seed, first_seed + num_seeds):
            verdict = simulate(seed)
            if verdict.violation:
                print(f"{name}: found by seed {seed}: {verdict.violation}")
                return True
    print(f"{name}: not found by {num_seeds} seeds")
    return False


def tell(verdict: Verdict) -> None:
    """Print a failing seed, and the command that shows it again."""
    print(f"seed {verdict.seed}: {verdict.violation}\n  again: tools/simulate_run.py --seed {verdict.seed} --trace")


if __name__ == "__main__":
    sys.exit(main())
