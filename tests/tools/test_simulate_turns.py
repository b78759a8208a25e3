"""What the simulated holders of GPUs do, against what can be said without a simulation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from simulate_turns import Moves, Policy, placements

NOTHING, SLOW = Moves(0.0, 0.0, 1.0), Moves(4.0, 2.0, 1.0)
STEPS = 50
ROOT = Path(__file__).parents[2]


def step_s(policies: list[Policy], moves: Moves = NOTHING, *, ahead: int) -> list[float]:
    return [row[2] for row in placements(policies, moves, steps=STEPS, ahead=ahead)]


def test_in_lockstep_a_policy_needs_no_second_gpu() -> None:
    """Learner and engine wait for each other anyway; what moves is all that turns cost."""
    apart, alone, _ = step_s([Policy(60.0, 120.0)], ahead=0)
    assert apart == pytest.approx(180.0)
    assert alone == pytest.approx(180.0)
    _, moved, _ = step_s([Policy(60.0, 120.0)], SLOW, ahead=0)
    assert moved == pytest.approx(180.0 + 2 * 4.0 + 2 * 2.0, abs=0.2)


def test_where_both_are_always_busy_turns_bring_nothing() -> None:
    """Of one GPU in place of two, a step takes twice as long, and what moves beside."""
    apart, alone, _ = step_s([Policy(100.0, 100.0)], ahead=2)
    assert apart == pytest.approx(100.0, rel=0.03)
    assert alone == pytest.approx(200.0, rel=0.01)


def test_two_policies_on_one_gpu_fill_a_part_of_each_others_waits() -> None:
    """Their engines sample side by side for 240 s, and both wait for environments for 180 s; learners take 60 s each.

    One behind the other they would need 360 s, as each does alone.
    """
    pair = [Policy(60.0, 120.0, 180.0)] * 2
    _, each, one = step_s(pair, ahead=0)
    assert each == pytest.approx(360.0)
    assert one == pytest.approx(240.0 + 180.0 + 2 * 60.0)


def test_no_policy_starves_and_no_second_is_lost_or_made_up() -> None:
    """Of unequal policies on one GPU all come to their end, after the sum of what they need at the earliest."""
    policies = [Policy(1.0, 300.0), Policy(100.0, 3.0), Policy(5.0, 5.0)]
    for ahead in (0, 1, 3):
        name, gpus, lasted_s, busy = placements(policies, SLOW, steps=STEPS, ahead=ahead)[-1]
        assert (name, gpus) == ("all policies on one GPU in turns", 1)
        work_s = sum(one.learn_s + one.sample_s for one in policies)
        assert lasted_s >= work_s
        assert busy * lasted_s == pytest.approx(work_s)


def test_the_page_has_what_the_tool_prints() -> None:
    """The table of docs/turns.md is that of the command below it."""
    page = (ROOT / "docs/turns.md").read_text()
    (line,) = [line for line in page.splitlines() if "tools/simulate_turns.py --policy" in line]
    words = line.strip().strip("`").removeprefix("python ").split()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [row for row in done.stdout.splitlines() if row.startswith("|")]
    assert all(row in page for row in rows[2:]), done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["policies"][0]["learn_s"] == 60.0
