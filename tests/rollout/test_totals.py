"""What a worker counts."""

from mrl.rollout.held_out import InFlight
from mrl.rollout.totals import WorkerTotals


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
