"""The verifier of `bench_async.py`, which takes 200 ms and no CPU, as one that asks a service elsewhere."""

import time

LATENCY_S = 0.2


def after_200_ms(reference: str, answer: str) -> float:
    """Return 1.0 for exactly the reference, else 0.0."""
    time.sleep(LATENCY_S)
    return float(answer == reference)
