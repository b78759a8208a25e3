"""Demand and progress from reported totals."""

import pytest

from mrl.allocation.meter import DecayedRatio, PolicyMeter, increments


def measured(tokens_per_busy_s: float, tokens_per_slot_s: float) -> PolicyMeter:
    """A meter after ten seconds of steady work on 10 slots, with a report each second."""
    meter = PolicyMeter()
    for second in range(1, 11):
        meter.add_rollout(10 * tokens_per_slot_s, 10.0, slots=10)
        meter.add_report(second * tokens_per_busy_s, float(second), 0.25 * second, now_s=float(second))
    return meter


def test_demand_is_the_ratio_of_two_rates() -> None:
    """A learner that trains 400 tokens per busy second needs 20 slots that make 20 tokens per second each."""
    assert measured(400.0, 20.0).demand_slots(now_s=10.0) == pytest.approx(20.0)


def test_demand_is_unknown_without_evidence() -> None:
    """Neither one message nor one side alone is a measurement."""
    meter = PolicyMeter()
    meter.add_report(1000.0, 10.0, 0.0, now_s=1.0)
    assert meter.demand_slots(now_s=1.0) is None

    meter.add_rollout(1.0, 0.1, slots=10)
    assert meter.demand_slots(now_s=1.0) is None


def test_progress_is_the_busy_share() -> None:
    """Four fifths busy, one fifth waiting for data."""
    assert measured(400.0, 20.0).progress() == pytest.approx(0.8)
    assert PolicyMeter().progress() == 0.0


def test_a_learner_that_falls_silent_demands_nothing_until_it_is_back() -> None:
    """Hung or done: its slots are of more use elsewhere; one report brings its demand back."""
    meter = measured(400.0, 20.0)
    assert meter.demand_slots(now_s=69.0) == pytest.approx(20.0)
    assert meter.demand_slots(now_s=71.0) == 0.0

    meter.add_report(4400.0, 11.0, 2.75, now_s=72.0)
    assert meter.demand_slots(now_s=72.0) == pytest.approx(20.0)


def test_slow_steps_are_no_silence() -> None:
    """A learner that reports every 100 s is not silent after 200 s."""
    meter = PolicyMeter()
    for step in range(1, 4):
        meter.add_report(1000.0 * step, 50.0 * step, 0.0, now_s=100.0 * step)

    assert not meter.is_silent(now_s=500.0)


def test_a_restarted_learner_counts_from_zero() -> None:
    """Totals that went backwards are increments, not a negative amount of work."""
    meter = measured(400.0, 20.0)
    meter.add_report(400.0, 1.0, 0.25, now_s=11.0)

    assert meter.demand_slots(now_s=11.0) == pytest.approx(20.0)
    assert increments((5.0, 1.0), (10.0, 2.0)) == (5.0, 1.0)
    assert increments((10.0, 2.0), (5.0, 0.5)) == (5.0, 1.5)


def test_old_evidence_fades_by_new_evidence_alone() -> None:
    """A rate that changed is believed after a few windows of work; standing still changes nothing."""
    ratio = DecayedRatio()
    ratio.add(100.0, 10.0, evidence_s=10.0)
    ratio.add(0.0, 0.0, evidence_s=0.0)
    assert ratio.value(1.0) == pytest.approx(10.0)

    for _ in range(30):
        ratio.add(200.0, 10.0, evidence_s=10.0)
    assert ratio.value(1.0) == pytest.approx(20.0, rel=0.01)
