"""Idle shares of units, by hand-made totals of their engines."""

import pytest

from mrl.allocation.allocation_limits import IDLE_INTERVAL_S
from mrl.allocation.engine_totals import UnitIdle
from mrl.records.leases import LeaseRequest


def request(active_s: float, *, unit: str = "cpu:0", epoch: int = 7) -> LeaseRequest:
    return LeaseRequest(
        holder="worker/a/0", policy="a", unit=unit, unit_epoch=epoch, epoch=epoch, generated_tokens=0,
        slot_seconds=0.0, active_s=active_s,
    )  # fmt: skip


def test_a_unit_is_idle_while_nobody_has_answers_in_flight_there() -> None:
    """cpu:0 is busy for 4 of 10 seconds; on cpu:1 nobody ever was."""
    idle = UnitIdle(["cpu:0", "cpu:1"], 100.0)
    for active_s in (50.0, 51.0, 54.0):  # what came before the first word was not seen
        idle.add(request(active_s))
    assert idle.shares(100.0 + IDLE_INTERVAL_S) == pytest.approx({"cpu:0": 0.6, "cpu:1": 1.0})


def test_nothing_is_told_before_the_interval_is_over_and_nothing_is_left_out() -> None:
    idle = UnitIdle(["cpu:0"], 0.0)
    idle.add(request(0.0))
    idle.add(request(5.0))
    assert idle.shares(IDLE_INTERVAL_S - 0.1) == {}
    assert idle.shares(20.0) == pytest.approx({"cpu:0": 0.75})
    assert idle.shares(30.0) == {"cpu:0": 1.0}


def test_what_an_engine_tells_late_counts_in_the_next_interval() -> None:
    """Busy all the time, but its words lie 1 second behind and come in lumps: the mean is right."""
    idle = UnitIdle(["cpu:0"], 0.0)
    idle.add(request(0.0))
    idle.add(request(9.0))
    first = idle.shares(10.0)["cpu:0"]
    idle.add(request(20.5))
    second = idle.shares(20.0)["cpu:0"]
    idle.add(request(27.5))
    third = idle.shares(30.0)["cpu:0"]
    assert (first, second) == pytest.approx((0.1, 0.0))
    assert first + second + third == pytest.approx((30.0 - 27.5) / 10.0)


def test_another_engine_and_totals_that_went_back_begin_anew() -> None:
    """A unit that changed hands keeps what the engine before did."""
    idle = UnitIdle(["cpu:0"], 0.0)
    for word in (request(8.0), request(9.0), request(100.0, epoch=8), request(102.0, epoch=8), request(1.0, epoch=8)):
        idle.add(word)
    assert idle.shares(10.0) == pytest.approx({"cpu:0": 0.6})
