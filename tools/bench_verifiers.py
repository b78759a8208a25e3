#!/usr/bin/env python3
"""Cost of judging an answer in a verifier process, for those who choose tasks: median, 95th percentile and CPU time.

    .venv/bin/python tools/bench_verifiers.py [DATASET ...] [--answers N]

Answers are judged one after another. Data sets are of reasoning-gym, by default one whose scorer only compares, in a
kept process, and all whose scorers evaluate answers, in a fresh sealed process each. Eight answers in a row are to one
entry, as in a group: its own answer, with more and more spaces behind it. Prints a line of JSON per data set.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Sequence
from contextlib import closing

from mrl.config.task_tables import TaskTable
from mrl.tasks.answer_grammars import GRAMMARS
from mrl.tasks.source import Item, Source
from mrl.tasks.sources import open_source
from mrl.tasks.verify import Judge

GROUP = 8
COMPARES = "sudoku"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", default=[COMPARES, *GRAMMARS], metavar="DATASET")
    parser.add_argument("--answers", type=int, default=400)
    args = parser.parse_args()
    for dataset in args.datasets:
        print(json.dumps(cost(dataset, args.answers)), flush=True)
    return 0


def cost(dataset: str, num_answers: int) -> dict[str, object]:
    """Measure the milliseconds per answer, from its submission to its verdict."""
    table = TaskTable(source="reasoning_gym", dataset=dataset, verifier_processes=1)
    source = open_source("t", table, seed=1)
    asked = [
        (item, (item.reference or "1") + " " * place)
        for item in source.items(1 + num_answers // GROUP)
        for place in range(GROUP)
    ]
    _, start_cpu_s = judged(table, source, asked[:1])
    took_ms, cpu_s = judged(table, source, asked[: num_answers + 1])
    cuts = statistics.quantiles(took_ms, n=20)
    figures = {"median_ms": statistics.median(took_ms), "p95_ms": cuts[18], "least_ms": min(took_ms)}
    figures["cpu_ms"] = 1000 * (cpu_s - start_cpu_s) / len(took_ms)
    rounded = {name: round(value, 2) for name, value in figures.items()}
    return {"dataset": dataset, "sealed": source.evaluates, "answers": len(took_ms), **rounded}


def judged(table: TaskTable, source: Source, asked: Sequence[tuple[Item, str]]) -> tuple[list[float], float]:
    """Return milliseconds of each answer but the first, and CPU seconds of the processes that judge, start included."""
    begin_cpu_s, took_ms = children_cpu_s(), list[float]()
    with closing(Judge({"t": table})) as judge:
        for one in asked:
            begin_s = time.perf_counter()
            judge.submit_answers("t", source, [one]).result()
            took_ms.append(1000 * (time.perf_counter() - begin_s))
    return took_ms[1:], children_cpu_s() - begin_cpu_s


def children_cpu_s() -> float:
    """CPU seconds of all ended descendants of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
