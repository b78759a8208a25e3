"""Time and scored tokens of a run, from the lines of its metrics."""

import weakref
from collections.abc import Iterator
from typing import Any

from mrl.report.comparison import spent_of


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


def test_the_lines_are_not_held() -> None:
    """After days a file of metrics is longer than what is free."""
    alive: list[weakref.ref] = []

    class Line(dict[str, Any]):
        pass

    def lines() -> Iterator[Line]:
        for second in range(100):
            one = Line(line(float(second)))
            alive.append(weakref.ref(one))
            yield one
            assert sum(ref() is not None for ref in alive) <= 2

    assert spent_of(lines()).running_s == 99.0


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
