"""A verifier that takes 200 ms and no CPU, as one that asks a service elsewhere; `bench_async.py` runs with it."""

import time

LATENCY_S = 0.2


def after_200_ms(reference: str, answer: str) -> float:
    """1.0 for exactly the reference."""
    time.sleep(LATENCY_S)
    return float(answer == reference)
