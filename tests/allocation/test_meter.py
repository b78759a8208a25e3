"""Demand, supply and silence from increments of counters."""

import pytest

from mrl.allocation.engine_meter import DecayedRatio
from mrl.allocation.meter import MeterSettings, PolicyMeter, increments

SETTINGS = MeterSettings(time_constant_s=60.0, min_busy_s=1.0, min_interval_s=5.0, doubtful_s=30.0, silent_s=60.0)


def measured(tokens_per_busy_s: float, tokens_per_slot_s: float) -> PolicyMeter:
    """A meter after ten seconds of steady work on 10 slots, with a report each second."""
    meter = PolicyMeter(SETTINGS)
    for second in range(1, 11):
        meter.add_generated(10 * tokens_per_slot_s, 10.0, evidence_s=1.0)
        meter.add_learner(tokens_per_busy_s, 1.0, 0.25, trained_groups=4, dropped_groups=0)
        meter.hear(float(second))
    return meter


def test_demand_is_the_ratio_of_two_rates() -> None:
    """A learner that trains 400 tokens per busy second needs 20 slots that make 20 tokens per second each."""
    assert measured(400.0, 20.0).demand_requests() == pytest.approx(20.0)


def test_demand_is_unknown_without_evidence() -> None:
    """One side alone is no measurement, and neither is half a busy second."""
    meter = PolicyMeter(SETTINGS)
    meter.add_learner(1000.0, 10.0, 0.0, trained_groups=1, dropped_groups=0)
    assert meter.demand_requests() is None

    meter = PolicyMeter(SETTINGS)
    meter.add_generated(100.0, 10.0, evidence_s=1.0)
    meter.add_learner(1000.0, 0.5, 0.0, trained_groups=1, dropped_groups=0)
    assert meter.demand_requests() is None


def test_demand_in_units_is_that_of_full_replicas() -> None:
    """Measured at 8 and 24 requests, the line tells what a replica makes that is full with 64."""
    meter = PolicyMeter()
    for running in (8, 24) * 5:
        slowness = 0.016 + 0.00025 * running
        tokens = 60.0 * running / slowness
        meter.add_generated(tokens, 60.0 * running, evidence_s=60.0)
        meter.engine().add_sample(60.0, 60.0 * running, tokens, interval_s=60.0)
    meter.add_learner(7166.0 * 100, 100.0, 0.0, trained_groups=32, dropped_groups=0)
    meter.engine().full_requests = 64.0

    assert meter.demand_units(2) == pytest.approx(2 * 7166.0 / (64 / (0.016 + 0.00025 * 64)), rel=0.02)


def test_groups_dropped_as_stale_raise_the_demand() -> None:
    """When one group in five is dropped, a quarter more has to be generated; below the least yield nothing counts."""
    meter = measured(400.0, 20.0)
    meter.add_learner(0.0, 0.0, 0.0, trained_groups=0, dropped_groups=10)
    assert meter.demand_requests() == pytest.approx(25.0, rel=0.01)

    meter.add_learner(0.0, 0.0, 0.0, trained_groups=0, dropped_groups=10_000)
    assert meter.demand_requests() == pytest.approx(20.0 / 0.3)


def test_progress_is_the_busy_share() -> None:
    """Four fifths busy, one fifth waiting for data."""
    assert measured(400.0, 20.0).progress() == pytest.approx(0.8)
    assert PolicyMeter().progress() == 0.0


def test_supply_is_what_engines_generate_over_what_the_learner_takes() -> None:
    """2,000 tokens in ten seconds are half of 400 per second; more than the learner takes counts as all."""
    meter = measured(400.0, 20.0)
    assert meter.end_interval(10.0, 10.0, num_engines=1)
    assert meter.supply_progress == pytest.approx(0.5)

    meter.add_generated(9000.0, 100.0, evidence_s=10.0)
    assert meter.end_interval(10.0, 20.0, num_engines=1)
    assert meter.supply_progress == 1.0


def test_a_short_interval_is_counted_with_the_next() -> None:
    """Tokens of a second stay until five have passed."""
    meter = measured(400.0, 20.0)
    assert not meter.end_interval(1.0, 10.0, num_engines=1)
    assert meter.end_interval(10.0, 19.0, num_engines=1)
    assert meter.supply_progress == pytest.approx(0.5)


def test_without_engines_supply_is_none_and_with_a_quiet_learner_unknown() -> None:
    """The first is 0, not unknown; the second says nothing about the engines."""
    meter = measured(400.0, 20.0)
    meter.end_interval(10.0, 10.0, num_engines=0)
    assert meter.supply_progress == 0.0

    meter.end_interval(10.0, 45.0, num_engines=1)
    assert meter.supply_progress is None


def test_a_learner_that_is_not_heard_of_is_silent_until_it_is_back() -> None:
    """One that was never heard of may still be starting."""
    meter = measured(400.0, 20.0)
    assert not meter.is_silent(now_s=69.0)
    assert meter.is_silent(now_s=71.0)
    meter.hear(72.0)
    assert not meter.is_silent(now_s=72.0)
    assert not PolicyMeter(SETTINGS).is_silent(now_s=1e9)


def test_totals_that_went_backwards_began_again_at_zero() -> None:
    """A restarted learner's totals are increments, not a negative amount of work."""
    assert increments((5.0, 1.0), (10.0, 2.0)) == (5.0, 1.0)
    assert increments((10.0, 2.0), (5.0, 0.5)) == (5.0, 1.5)


def test_old_evidence_fades_by_new_evidence_alone() -> None:
    """A rate that changed is believed after a few windows of work; standing still changes nothing."""
    ratio = DecayedRatio()
    ratio.add(100.0, 10.0, 10.0, 60.0)
    ratio.add(0.0, 0.0, 0.0, 60.0)
    assert ratio.value(1.0) == pytest.approx(10.0)

    for _ in range(30):
        ratio.add(200.0, 10.0, 10.0, 60.0)
    assert ratio.value(1.0) == pytest.approx(20.0, rel=0.01)
