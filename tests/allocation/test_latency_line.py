"""The latency line against plain weighted least squares, and where samples tell no line."""

import math

import numpy as np
import pytest

from mrl.allocation.engine_meter import RIDGE, LatencyLine


def by_least_squares(samples: list[tuple[float, float, float]], running: float) -> float:
    """All samples (c, z, keep) at once, each with its weight, and the ridge as two more samples of zero."""
    weights = [math.prod(keep for _, _, keep in samples[number + 1 :]) for number in range(len(samples))]
    rows = [(weight**0.5, weight**0.5 * c) for weight, (c, _, _) in zip(weights, samples, strict=True)]
    values = [weight**0.5 * z for weight, (_, z, _) in zip(weights, samples, strict=True)]
    rows += [(RIDGE[0] ** 0.5, 0.0), (0.0, RIDGE[1] ** 0.5)]
    (a, b), *_ = np.linalg.lstsq(np.array(rows), np.array([*values, 0.0, 0.0]), rcond=None)
    mean = sum(weight * z for weight, (_, z, _) in zip(weights, samples, strict=True)) / sum(weights)
    return float(a + b * running) if a > 0.0 and b >= 0.0 else mean


@pytest.mark.parametrize("seed", range(20))
def test_the_line_is_that_of_least_squares(seed: int) -> None:
    """Random engines, noise and decay; falling and proportional ones too, of which the mean is taken."""
    rng = np.random.default_rng(seed)
    a, b, noise = rng.uniform(-0.01, 0.03), rng.uniform(-0.0002, 0.0008), rng.choice([0.0, 0.1, 1.0])
    line, samples = LatencyLine(), []
    for _ in range(rng.integers(1, 40)):
        c, keep = rng.uniform(1.0, 64.0), rng.uniform(0.5, 1.0)
        z = max(1e-4, (a + b * c) * (1.0 + noise * rng.normal()))
        line.add(c, z, keep)
        samples.append((c, z, keep))
    for running in (1.0, 30.0, 128.0):
        assert line.seconds_per_token(running) == pytest.approx(by_least_squares(samples, running), rel=1e-6)


def test_half_empty_engines_tell_what_a_full_one_makes() -> None:
    """Seen at 8 and 24 requests, foreseen at 64; without samples nothing is."""
    line = LatencyLine()
    assert line.seconds_per_token(64) is None
    for running in (8, 24) * 4:
        line.add(running, 0.02 + 0.0005 * running, keep=0.9)
    assert line.seconds_per_token(64) == pytest.approx(0.052, rel=0.02)


@pytest.mark.parametrize("samples", [[(16, 0.04), (48, 0.02)], [(16, 0.01), (48, 0.04)]], ids=["falling", "steep"])
def test_where_samples_tell_no_line_the_mean_is_taken(samples: list[tuple[float, float]]) -> None:
    """More requests cannot take less time each, and one alone not none."""
    line = LatencyLine()
    for running, seconds in samples:
        line.add(running, seconds, keep=1.0)
    assert line.seconds_per_token(64) == pytest.approx(sum(seconds for _, seconds in samples) / 2)
