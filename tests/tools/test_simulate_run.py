"""Whole runs in virtual time: nothing is found in the code as it is, and every planted mistake is."""

import pytest
import simulate_run
from run_simulation.planted import PLANTED, plant
from run_simulation.trial import Verdict, simulate

CLEAN_SEEDS, NUM_SEEDS, MOST_SEEDS = 100, 200, 400
QUICK = {"run epoch used again", "acknowledged before the commit", "groups taken over twice", "allocators counted anew"}


def first_found(seeds: range) -> Verdict | None:
    """The first seed that violates anything."""
    return next((verdict for verdict in map(simulate, seeds) if verdict.violation), None)


def test_a_seed_is_played_alike_twice() -> None:
    """And says what it did: records were acknowledged, groups trained, failures rescued."""
    first, second = simulate(5), simulate(5)

    assert first == second
    assert not first.violation, first.violation
    assert min(first.counts[what] for what in ("acknowledged", "trained", "rescues")) > 0
    assert simulate(6).digest != first.digest


@pytest.mark.thorough
def test_nothing_is_found() -> None:
    """With other seeds: tools/simulate_run.py --first-seed 1000000 --seeds 10000, every night."""
    found = first_found(range(CLEAN_SEEDS))

    assert found is None, f"{found.violation}; again: tools/simulate_run.py --seed {found.seed} --trace"


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough]) for name in PLANTED]
)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    """Most by one of the first five seeds; the rarest needs many more."""
    with plant(mistake):
        assert first_found(range(MOST_SEEDS)) is not None


def test_a_failing_seed_says_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole story with --trace."""
    with plant("run epoch used again"):
        found = first_found(range(NUM_SEEDS))
        assert found is not None
        monkeypatch.setattr("sys.argv", ["simulate_run.py", "--seed", str(found.seed), "--trace"])
        assert simulate_run.main() == 1
    story = capsys.readouterr().out
    assert "fault: " in story
    assert "is used twice" in story.splitlines()[-1]

    simulate_run.tell(Verdict(7, "something", "", 1.0, 1))
    assert capsys.readouterr().out == "seed 7: something\n  again: tools/simulate_run.py --seed 7 --trace\n"
