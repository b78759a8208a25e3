"""What the tool reads of runs, and whom it would kill."""

import json
import os

import pytest
from kill_exchange import WINDOW_STEPS, daemon_pid, ended, smooth


def test_a_curve_is_smoothed_over_the_last_steps():
    """Over as many as there are at first."""
    steps, means = smooth([(step, float(step)) for step in range(1, 2 * WINDOW_STEPS + 1)])
    assert steps == list(range(1, 2 * WINDOW_STEPS + 1))
    assert means[:2] == [1.0, 1.5]
    assert means[-1] == pytest.approx(sum(range(WINDOW_STEPS + 1, 2 * WINDOW_STEPS + 1)) / WINDOW_STEPS)


def test_only_a_daemon_is_killed(tmp_path):
    """Not whoever has its pid by now."""
    assert daemon_pid(tmp_path) == 0
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints" / "exchange.json").write_text(json.dumps({"pid": os.getpid()}))
    assert daemon_pid(tmp_path) == 0


def test_a_run_is_known_by_its_metrics(tmp_path):
    """Rewards of every policy, and the last accuracy of each."""
    lines = [
        {"policy": "qwen", "step": 1, "values": {"reward/mean": 0.25}},
        {"policy": "qwen", "step": 0, "values": {"eval/accuracy": 0.1}},
        {"policy": "qwen", "step": 2, "values": {"reward/mean": 0.5}},
        {"policy": "qwen", "step": 2, "values": {"eval/accuracy": 0.4}},
        {"policy": "llama", "step": 2, "values": {"eval/accuracy": 0.8}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ended(tmp_path, "killed", 0, 3)
    assert (found.rewards, found.accuracy, found.kills) == ({"qwen": [(1, 0.25), (2, 0.5)]}, pytest.approx(0.6), 3)
