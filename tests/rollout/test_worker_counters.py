"""What a worker counts."""

import pytest

from mrl.rollout.held_out_answers import InFlight
from mrl.rollout.worker_counters import WorkerTotals


def test_sampled_tokens_go_on_over_a_restart_of_the_engine() -> None:
    """An engine that starts again counts from zero."""
    totals = WorkerTotals(0.0)
    for engine_tokens in (10, 25, 5, 7):
        totals.sampled(engine_tokens, InFlight(4, 0))
    assert totals.sampled_tokens == 32


def test_an_engine_is_full_with_what_it_had_when_it_took_no_more() -> None:
    """Until it is seen to hold more; while all fits nothing is said."""
    totals, seen = WorkerTotals(0.0), []
    for answers, is_full in ((8, False), (12, True), (6, False), (14, False), (10, True)):
        totals.in_flight(answers, is_full=is_full)
        seen.append(totals.full_answers)
    assert seen == [0, 12, 12, 14, 10]


def test_held_out_answers_are_no_part_of_what_the_allocator_learns_from() -> None:
    """Two seconds with six answers of groups and two others, then one with these alone; 800 and 50 tokens."""
    totals = WorkerTotals(0.0)
    totals.passed(2.0, InFlight(6, 2), InFlight(6, 2))
    totals.sampled(800, InFlight(6, 2))
    totals.passed(1.0, InFlight(0, 2), InFlight(0, 2))
    totals.sampled(850, InFlight(0, 2))
    totals.passed(4.0, InFlight(0, 0), InFlight(0, 0))

    assert (totals.slot_seconds, totals.held_out_slot_seconds) == (12.0, 6.0)
    assert totals.sampled_tokens == 600
    assert (totals.busy_s, totals.idle_s) == (3.0, 4.0)
    assert totals.values(7.0)["rollout/held_out_share"] == pytest.approx(1 / 3)


def test_requests_outside_of_episodes_are_no_part_of_it_either() -> None:
    """Two seconds with six answers of groups and two others, of whose 800 tokens the groups have six parts of eight."""
    totals = WorkerTotals(0.0)
    totals.passed(2.0, InFlight(6, 0, 2), InFlight(6, 0, 2))
    totals.sampled(800, InFlight(6, 0, 2))
    totals.passed(1.0, InFlight(0, 0, 2), InFlight(0, 0, 2))

    assert (totals.slot_seconds, totals.held_out_slot_seconds, totals.busy_s) == (12.0, 0.0, 3.0)
    assert totals.sampled_tokens == 600
