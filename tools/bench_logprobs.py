"""Measures log-probabilities in chunks against full logits: peak memory and time of forward and backward.

Every measurement is a process of its own: 6144 tokens, hidden width 1024, a vocabulary of 151,936 (Qwen's), float32,
one thread. Peak memory is what the process gains over its inputs and the gradients of an earlier pass; times are the
best of several rounds in turn.

    .venv/bin/python tools/bench_logprobs.py [--rounds N]

Prints a table; the last line is JSON; exit code 1 when chunks take more than 0.15 of the memory or 1.3 of the time.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor

from mrl.learner.forward import ForwardSettings
from mrl.objectives.logprobs import token_logprobs

TOKENS, HIDDEN, VOCAB = 6144, 1024, 151_936
MEMORY_SHARE, TIME_SHARE = 0.15, 1.3
WAYS = ("full logits", "chunks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one)))
        return 0
    rounds = [{way: in_a_process(way) for way in WAYS} for _ in range(asked.rounds)]
    best = {way: [min(found[way][number] for found in rounds) for number in range(2)] for way in WAYS}
    (full_s, full_mib), (chunks_s, chunks_mib) = best["full logits"], best["chunks"]
    print("| way | seconds | peak MiB |\n|---|--:|--:|")
    for way, (seconds, mib) in best.items():
        print(f"| {way} | {seconds:.2f} | {mib:.0f} |")
    rows = [
        row("peak memory of chunks", chunks_mib, "MiB", chunks_mib / full_mib, MEMORY_SHARE),
        row("time of chunks", chunks_s, "s", chunks_s / full_s, TIME_SHARE),
    ]
    for one in rows:
        print(f"{one['name']}: {one['ratio']:.2f} of full logits (<= {one['required']})")
    print(json.dumps({"bench": "logprobs", "rows": rows}))
    return 0 if all(one["ok"] for one in rows) else 1


def in_a_process(way: str) -> list[float]:
    """(seconds, MiB) of one measurement."""
    argv = [sys.executable, __file__, "--one", way]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def measure(way: str) -> tuple[float, float]:
    """Seconds of a forward and a backward pass, and MiB that they needed beyond inputs and gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).requires_grad_()
    head = torch.randn(VOCAB, HIDDEN).mul_(0.02).requires_grad_()
    hidden.grad, head.grad = torch.zeros_like(hidden), torch.zeros_like(head)  # as from the microbatch before
    targets = torch.randint(0, VOCAB, (TOKENS,))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.perf_counter()
    logprobs(way, hidden, head, targets).sum().backward()
    seconds = time.perf_counter() - began_s
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024


def logprobs(way: str, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """[T] log-probabilities."""
    if way == "chunks":
        chunk_tokens = ForwardSettings(1.0).tokens_at_once(VOCAB)
        return token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=chunk_tokens)
    return (hidden @ head.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def row(name: str, value: float, unit: str, ratio: float, required: float) -> dict[str, object]:
    """A row of the JSON line; the ratio may not exceed what is required."""
    return {"name": name, "value": value, "unit": unit, "against": "full logits", "ratio": ratio,
            "required": required, "ok": ratio <= required}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
