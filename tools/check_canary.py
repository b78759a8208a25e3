#!/usr/bin/env python3
"""Check of the canary, for those who rely on it: it finds engines with wrong weights, and believes healthy ones.

    .venv/bin/python tools/check_canary.py [--quick] [--vllm]

A learner of random weights, whose head is scaled until its logits have a standard deviation of 1 to 4, takes a step of
AdamW and publishes. Engines of other kernels, batches and orders of arithmetic load the version by `install`; they give
no checksums of their weights, so the canary alone decides. Healthy ones have to be served. Into the others a fault is
planted:

stale      all tensors are those of the version before
half       every second tensor is that of the version before
late       the second half of the layers is that of the version before
q swapped  the query projections of two layers are exchanged
gate / up  two projections of one layer are exchanged

In float32 every fault has to be found, also at a learning rate of 1e-6. In bfloat16 a stale version has to be found at
1e-5; half an update may also be reported as "untold". At 1e-6 a step is far smaller than rounding in bfloat16, and so
is the first step of a model that was released in 16 bits: there a stale version may be untold as well. The last rows
are of adapters over such weights, which began at zero: an exchange of two of them is too small a part of the step to be
told, and is left to the checksums. No faulty engine may ever be believed. With --vllm also a real server in bfloat16.

"off by" is the mean difference of healthy engines as a multiple of the noise that the learner measured. Exit code 1
when a healthy engine was refused or a faulty one believed. Ends with one line of JSON.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import structlog
from bench_row import Row
from canary_check.cases import LR, Case, cases
from canary_check.engines import FAULTS, HEALTHY, InProcess, vllm_server
from canary_check.learner import FIRST, SECOND, Published, publish_two
from transformers.utils import logging

from mrl.engines.engine import Engine
from mrl.errors import WeightsUnproved
from mrl.rollout.weight_updates import install
from mrl.weights.canary import FLOOR_NATS, CanaryGap


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small models")
    parser.add_argument("--vllm", action="store_true", help="one more row: a vLLM server on the CPU, in bfloat16")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    logging.disable_progress_bar()
    totals: Counter[str] = Counter()
    print(f"{'learner':<10}{'engine':<10}{'layers':>6}{'std':>5}{'lr':>8}{'healthy: off by':>18}{'':>4}", end="")
    print("".join(f"{fault:>11}" for fault in FAULTS), flush=True)
    for case in cases(quick=arguments.quick):
        with tempfile.TemporaryDirectory(prefix="mrl-canary-") as folder:
            totals += judge(case, publish_two(case, Path(folder)))
    if arguments.vllm:
        case = Case("float32", "bfloat16", num_layers=8, logit_std=3.0, lr=LR)
        with tempfile.TemporaryDirectory(prefix="mrl-canary-") as folder, ExitStack() as closing:
            published = publish_two(case, Path(folder))
            totals += judge(case, published, vllm_server(published, Path(folder), closing))
    rows = as_rows(totals)
    seconds = round(time.monotonic() - began_s, 1)
    print(json.dumps({"bench": "canary", "rows": [row.fields for row in rows], "seconds": seconds}))
    return 0 if all(row.ok for row in rows) else 1


def judge(case: Case, published: Published, server: Engine | None = None) -> Counter[str]:
    """Let every engine of a case take both versions; print a line and return the counts of verdicts."""
    counts: Counter[str] = Counter()
    gaps: list[CanaryGap] = []
    engines: list[Engine | InProcess] = (
        [server] if server else [InProcess(case, published.start, kind=kind) for kind in HEALTHY]
    )
    for engine in engines:
        gap = served(engine, published)
        counts["healthy, refused" if gap is None else "healthy, served"] += 1
        gaps += [] if gap is None else [gap]
    tried = {} if server else {fault: number for number, fault in enumerate(FAULTS) if fault not in case.left_out}
    found = {fault: verdict(case, published, number, fault) for fault, number in tried.items()}
    counts.update(f"faulty, {told}" for told in found.values())
    off = [gap.mean_nats / max(gap.noise_nats, FLOOR_NATS) for gap in gaps]
    name = "vLLM" if server else "adapters" if case.adapters else case.engine
    print(f"{case.precision:<10}{name:<10}{case.num_layers:>6}{case.logit_std:>5.0f}{case.lr:>8.0e}", end="")
    print(f"{min(off, default=math.nan):>8.2f} to {max(off, default=math.nan):.2f} x", end="")
    print("    " if len(gaps) == len(engines) else "  X ", end="")
    print("".join(f"{told:>11}" for told in found.values()), flush=True)
    return counts


def verdict(case: Case, published: Published, number: int, fault: str) -> str:
    """Verdict on an engine with this fault: "found", "untold" or "BELIEVED"; each fault has another kind of engine."""
    kinds = [*HEALTHY]
    gap = served(InProcess(case, published.start, kind=kinds[number % len(kinds)], fault=fault), published)
    if gap is None:
        return "found"
    may_be_untold = fault in case.may_be_untold and not gap.tells_versions
    return "untold" if may_be_untold else "BELIEVED"


def served(engine: Engine | InProcess, published: Published) -> CanaryGap | None:
    """Install both versions in an engine; return its gap to the learner, or None when it is refused."""
    asked = cast(Engine, engine)  # `install` asks for no more than InProcess has
    try:
        install(asked, published.first, FIRST)
        return install(asked, published.second, SECOND).gap
    except WeightsUnproved:
        return None


def as_rows(totals: Counter[str]) -> list[Row]:
    """Rows of the counts of healthy and of faulty engines."""
    healthy, faulty = (
        sum(count for name, count in totals.items() if name.startswith(of)) for of in ("healthy", "faulty")
    )
    refused, believed = totals["healthy, refused"], totals["faulty, BELIEVED"]
    return [
        Row("healthy engines refused", refused, "engines", "healthy engines", refused / healthy, "<=0"),
        Row("faulty engines believed", believed, "engines", "faulty engines", believed / faulty, "<=0"),
        Row(
            "faulty engines found",
            totals["faulty, found"],
            "engines",
            "faulty engines",
            totals["faulty, found"] / faulty,
        ),
        Row("faulty engines told as untold", totals["faulty, untold"], "engines"),
    ]


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    sys.exit(main())
