"""The benchmark of episodes: a tiny run of it, and what its figures say."""

import json
import subprocess
import sys
from pathlib import Path

import bench_episodes
import pytest
from bench_episodes import KEPT, READ_AGAIN, SINGLE, Figures, rows_of

TOOL = Path(__file__).parents[2] / "tools/bench_episodes.py"


@pytest.mark.thorough
def test_a_tiny_run_ends_with_its_figures():
    """Real environments play, and every way has sampled what was meant."""
    done = subprocess.run(
        [sys.executable, TOOL, "--rounds", "1", "--groups", "2"], capture_output=True, text=True, timeout=240
    )

    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["bench"] == "episodes"
    values = {row["name"]: row["value"] for row in told["rows"]}
    assert all(values[f"{name}: a second"] > 0 for name in (SINGLE, "instant", "50 ms", KEPT, READ_AGAIN))


@pytest.mark.parametrize(("slow_s", "is_ok"), [(3.9, True), (4.1, False)])
def test_an_environment_that_waits_may_not_halve_the_pace(slow_s, is_ok):
    """Ratios are to answers of one turn, but for what is required."""
    hundredths = {SINGLE: (1.0, 1.0), "instant": (2.0, 1.8), "50 ms": (slow_s, 2.0), KEPT: (5.0, 4.0)}
    hundredths |= {READ_AGAIN: (8.0, 8.0)}
    figures = {name: Figures(wall / 100, cpu / 100) for name, (wall, cpu) in hundredths.items()}

    rows = {row.name: row for row in rows_of(figures)}

    assert (rows["instant: a second"].value, rows["instant: a second"].ratio) == pytest.approx((50.0, 0.5))
    assert rows["instant: CPU"].ratio == pytest.approx(1.8)
    kept = rows[f"{KEPT}: CPU of an episode"]
    assert (kept.value, kept.ratio) == pytest.approx((40.0, 0.5))
    turn_ms = rows["instant: CPU of a turn beyond its tokens"].value
    assert turn_ms == pytest.approx(1000 * 0.8 / (100 * bench_episodes.TURNS))
    assert all(row.ok for row in rows.values()) == is_ok


def test_another_number_of_tokens_is_an_error():
    """A benchmark whose environments failed would be fast."""

    class Nothing:
        def submit(self, requests):
            self.left = [None] * sum(one.seeds.size for one in requests)

        def collect(self, timeout_s):
            from types import SimpleNamespace

            import numpy as np

            return [SimpleNamespace(generation=SimpleNamespace(logprobs=np.zeros(1))) for _ in self.left]

    requests = bench_episodes.Single.requests(None, 1, 0)
    with pytest.raises(RuntimeError, match="an environment failed"):
        bench_episodes.play(Nothing(), requests)
