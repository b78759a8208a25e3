"""Speeds on types that were not measured, against loops over all pairs."""

import math
import random

import pytest

from mrl.allocation.engine_meter import Speeds, foreseen_speeds


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def slow_twin(measured: dict[str, Speeds], policy: str, kind: int) -> float | None:
    """One gap, step by step."""
    own = measured[policy]
    if own[kind] is not None:
        return own[kind]
    by_ratio, as_they_are = [], []
    for other, speed in enumerate(own):
        if speed is None:
            continue
        as_they_are.append(speed)
        ratios = []
        for speeds in measured.values():
            here, there = speeds[kind], speeds[other]
            if here is not None and there is not None:
                ratios.append(here / there)
        if ratios:
            by_ratio.append(speed * mean(ratios))
    return mean(by_ratio or as_they_are) if as_they_are else None


@pytest.mark.parametrize("seed", range(20))
def test_gaps_are_filled_as_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    measured: dict[str, Speeds] = {
        f"p{index}": [rng.uniform(0.1, 9.0) if rng.random() < 0.5 else None for _ in range(3)] for index in range(4)
    }
    for policy, speeds in foreseen_speeds(measured).items():
        wanted = [slow_twin(measured, policy, kind) for kind in range(3)]
        assert speeds == (None if None in wanted else pytest.approx(wanted)), policy


def test_what_all_others_lost_on_a_type_is_expected_and_otherwise_nothing() -> None:
    assert foreseen_speeds({"a": (1.0, None)}) == {"a": (1.0, 1.0)}
    assert foreseen_speeds({"a": (1.0, None), "b": (4.0, 1.0)})["a"] == pytest.approx((1.0, 0.25))
    assert foreseen_speeds({"a": (None, None), "b": (4.0, 1.0)})["a"] is None
