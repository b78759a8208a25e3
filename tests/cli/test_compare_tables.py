"""Numbers of a comparison that only the metrics of its runs tell, and the tables that hold them."""

from typing import Any

import pytest

from mrl.cli.compare_tables import Measured, Spent, comparison_grids, comparison_json, num_seeds, spent_of
from mrl.report.comparison import AVERAGE, Outcome


def line(time_s: float, role: str = "supervisor", pid: int | None = None, **values: float) -> dict[str, Any]:
    """One line of `metrics.jsonl`; `scored` stands for its metric."""
    found: dict[str, Any] = {"time_unix_s": time_s, "role": role, "policy": ""}
    if pid is not None:
        return found | {"heartbeat": {"pid": pid}}
    return found | {"step": 1, "values": {"scoring/tokens" if k == "scored" else k: v for k, v in values.items()}}


def test_the_time_of_a_run_is_that_of_all_attempts_without_the_pauses_between() -> None:
    """Two attempts of 30 and 20 s, a day apart; roles may report out of order."""
    first = [line(1000.0 + 5 * beat) for beat in range(7)]
    second = [line(90_000.0 + 5 * beat) for beat in range(5)]
    assert spent_of([*first[::-1], *second]).running_s == 50.0
    assert spent_of([]).running_s == 0.0


def test_scored_tokens_are_added_over_workers_and_their_lives() -> None:
    """A worker counts from its start: of each life the last count stands, however it compares to the one before."""
    lines = [
        line(1, "worker/t/0", pid=10),
        line(2, "worker/t/0", scored=5),
        line(3, "worker/t/0", scored=8),
        line(4, "worker/a/0", scored=100),
        line(5, "worker/t/0", pid=11),
        line(6, "worker/t/0", scored=20),
        line(7, "worker/t/0", scored=4),
        line(8, "learner/a", reward=1),
    ]
    assert spent_of(lines).scored_tokens == 8 + 20 + 4 + 100


def measured(scored: float, end: float = 0.5) -> Measured:
    curves = {"a": {0: 0.1, 2: end}, AVERAGE: {0: 0.1, 2: end}}
    return Measured(Outcome(curves, 1.0, 2.0, 3.0, 0.0, 0.0, 90.0), Spent(90.0, scored))


def test_what_a_teacher_scored_stands_among_the_spendings() -> None:
    """The mean over seeds, beside the tokens that were trained on; and every seed's own number."""
    found = {"independent": {1: measured(0)}, "rlad": {1: measured(1000), 2: measured(2000)}}
    spendings = comparison_grids(found)[2]
    place = list(spendings.head).index("scored tokens")
    assert spendings.head[place - 1 : place + 2] == ["of peers", "scored tokens", "MiB shared"]
    assert [row[place] for row in spendings.rows] == ["0", "1,500"]
    assert {len(row) for row in spendings.rows} == {len(spendings.head)}
    assert comparison_json(found)["rlad"]["seeds"]["2"]["scored_tokens"] == 2000


def test_no_column_stands_for_what_no_run_did() -> None:
    """Where nobody scored."""
    assert "scored tokens" not in comparison_grids({"sgt": {1: measured(0)}})[2].head


@pytest.mark.parametrize(
    ("seeds", "told"),
    [({"sgt": 3, "prp": 3}, "3 each"), ({"sgt": 3, "prp": 1}, "sgt 3, prp 1"), ({"sgt": 1}, "1 each")],
)
def test_the_title_says_how_many_seeds_every_row_has(seeds: dict[str, int], told: str) -> None:
    """An interrupted comparison may have more of one than of another."""
    found = {regime: {seed: measured(0) for seed in range(number)} for regime, number in seeds.items()}
    assert num_seeds(found) == told
    assert f"mean over policies and seeds ({told})" in comparison_grids(found)[0].title
