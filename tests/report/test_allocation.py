"""The line about the shares of the capacity, from hand-made metrics of the allocator."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from mrl.records.telemetry_messages import MetricsRecord
from mrl.report.allocation import Allocation
from mrl.report.run_display import RunDisplay

T0 = 1_760_000_000.0
NEEDED, GONE = "another_policy_needs_it_more", "its_engine_is_gone"


def record(policy: str, second: float, **values: float) -> MetricsRecord:
    """Of the allocator, told at this second of its clock; two underscores stand for a slash."""
    named = {f"allocation/{name.replace('__', '/')}": value for name, value in values.items()}
    return MetricsRecord(role="allocator", policy=policy, step=1, time_unix_s=T0 + second, values=named)


def units(policy: str, second: float, held: int, begun: int, **ended: float) -> MetricsRecord:
    return record(
        policy, second, held_units=held, begun_leases=begun,
        **{f"ended_leases__{why}": number for why, number in ended.items()},
    )  # fmt: skip


def take(*records: MetricsRecord, allocation: Allocation | None = None) -> Allocation:
    """Each arrives at its second."""
    allocation = allocation or Allocation()
    for one in records:
        allocation.take(one, one.time_unix_s - T0)
    return allocation


def test_nothing_is_said_before_the_allocator_has_spoken() -> None:
    assert Allocation().line(5.0) == ""
    assert take(record("qwen", 1.0, progress=0.5)).line(5.0) == ""


def test_slots_that_moved_are_told_of_one_decision_together() -> None:
    """The first word about a share is no move; the newest move is shown."""
    allocation = take(record("qwen", 0.0, slots=120), record("llama", 0.0, slots=136))
    assert allocation.line(1.0) == "slots qwen 120 llama 136"
    because = {"moves_because__a_better_split": 24}
    take(record("qwen", 10.0, slots=96, **because), record("llama", 10.01, slots=160, **because), allocation=allocation)
    assert allocation.line(13.0) == "slots qwen 96 llama 160 | last move qwen -24 llama +24 3.0s ago: a better split"
    because = {"moves_because__who_takes_part_has_changed": 8}
    take(record("llama", 20.0, slots=152, **because), allocation=allocation)
    assert allocation.line(20.0).endswith("last move llama -8 0.00s ago: who takes part has changed")


def test_slots_that_nobody_takes_are_no_move() -> None:
    """At the end of a run every policy gives up its share."""
    because = {"moves_because__who_takes_part_has_changed": 128}
    allocation = take(record("qwen", 0.0, slots=128), record("llama", 0.0, slots=128))
    take(record("qwen", 9.0, slots=0, **because), record("llama", 9.01, slots=0, **because), allocation=allocation)
    assert allocation.line(9.5) == "slots qwen 0 llama 0"


def test_what_is_told_again_or_later_is_another_move() -> None:
    """However soon the same policy moves again. The first shares of a run, and changes without a reason, are none."""
    because = {"moves_because__a_better_split": 1}
    allocation = take(record("qwen", 0.0, slots=100, **because), record("llama", 0.0, slots=100, **because))
    take(record("qwen", 1.0, slots=90), record("llama", 1.0, slots=110), allocation=allocation)
    assert allocation.line(1.0) == "slots qwen 90 llama 110"
    take(record("qwen", 2.0, slots=91, **because), record("qwen", 2.1, slots=93, **because), allocation=allocation)
    assert "last move qwen +2 1.0s ago" in allocation.line(3.1)
    take(record("llama", 2.7, slots=109, **because), allocation=allocation)
    assert "last move llama -1 1.0s ago" in allocation.line(3.7)


def test_units_of_several_types_are_told_apart() -> None:
    """What a policy has none of is left out; one with nothing has 0."""
    held = {"held_units__H100": 1.0, "held_units__NVIDIA A10": 2.0}
    allocation = take(record("qwen", 0.0, held_units=3, **held))
    take(record("llama", 0.0, held_units=2, **{**held, "held_units__H100": 0.0}), allocation=allocation)
    take(record("gemma", 0.0, held_units=0, **dict.fromkeys(held, 0.0)), allocation=allocation)
    assert allocation.line(1.0) == "units qwen 1 H100 + 2 NVIDIA A10 llama 2 NVIDIA A10 gemma 0"


def test_a_unit_that_moves_is_told_of_while_it_is_on_its_way_and_when_it_has_come() -> None:
    """The first leases of a run, and one for a unit that was free, are no moves."""
    allocation = take(units("qwen", 0.0, 0, 0), units("llama", 0.0, 0, 0))
    take(units("qwen", 2.0, 3, 3), units("llama", 2.0, 5, 5), allocation=allocation)
    assert allocation.line(2.0) == "units qwen 3 llama 5"
    take(units("qwen", 8.0, 2, 3, **{NEEDED: 1}), units("llama", 8.0, 5, 5, **{GONE: 0}), allocation=allocation)
    assert allocation.line(9.0).endswith(" | last move qwen -> ... 1.0s ago: another policy needs it more")
    take(units("qwen", 10.0, 2, 3, **{NEEDED: 1}), units("llama", 10.0, 6, 6), allocation=allocation)
    take(units("qwen", 12.0, 3, 4, **{NEEDED: 1}), units("qwen", 14.0, 4, 5, **{NEEDED: 1}), allocation=allocation)
    assert allocation.line(20.0).endswith(" | last move qwen -> llama 12s ago: another policy needs it more")
    assert allocation.move is not None
    assert allocation.move.changes == [("qwen", -1.0), ("llama", 1.0)]


def test_an_engine_that_was_lost_and_replaced_is_a_move_to_the_same_policy() -> None:
    allocation = take(units("qwen", 0.0, 1, 1))
    take(units("qwen", 1.0, 0, 1, **{GONE: 1}), units("qwen", 2.0, 1, 2, **{GONE: 1}), allocation=allocation)
    assert allocation.line(2.0) == "units qwen 1 | last move qwen -> qwen 1.0s ago: its engine is gone"


def test_counts_of_an_allocator_that_was_started_again_begin_anew() -> None:
    """That they are smaller says nothing; that they grow again does."""
    allocation = take(units("qwen", 0.0, 1, 7, **{GONE: 3}), units("qwen", 1.0, 1, 0), units("qwen", 2.0, 1, 0))
    assert allocation.line(3.0) == "units qwen 1"
    take(units("qwen", 3.0, 0, 0, **{GONE: 1}), allocation=allocation)
    assert "qwen -> ... 0.00s ago" in allocation.line(3.0)


def test_the_idle_time_is_the_mean_over_units_of_what_was_told_last() -> None:
    allocation = take(
        units("qwen", 0.0, 2, 2), record("", 10.0, **{"idle_share__cpu:0": 0.9, "idle_share__cpu:1": 0.3})
    )
    take(record("", 20.0, **{"idle_share__cpu:0": 0.1}), allocation=allocation)
    assert allocation.line(20.0) == "units qwen 2, idle 20%"


def test_the_age_of_a_move_is_told_by_the_clock_of_the_allocator() -> None:
    """Metrics of an earlier attempt arrive all at once; a clock on another host may be hours off."""
    allocation = Allocation()
    because = {"moves_because__a_better_split": 24}
    for one in (
        record("qwen", 0.0, slots=120), record("qwen", 100.0, slots=96, **because), record("qwen", 160.0, slots=96)
    ):  # fmt: skip
        allocation.take(one, 5000.0)
    assert "60s ago" in allocation.line(5000.0)
    assert "70s ago" in allocation.line(5010.0)
    allocation.take(record("qwen", 400.0, slots=96), 5020.0)
    assert "300s ago" in allocation.line(5020.0)


@pytest.mark.parametrize("width", [80, 120])
def test_live_view_and_headless_line_show_it(
    make_config: Callable[..., Any], make_stream: Callable[..., Any], width: int
) -> None:
    """In one line, however narrow the terminal; the move in whole from 120 columns on."""
    board = RunDisplay(make_config(2))
    for now_s, one in make_stream(2, until=30):
        board.apply(one, now_s)
    console = Console(width=width, height=30, file=io.StringIO(), record=True, force_terminal=True)
    console.print(board.render(now_s))
    lines = console.export_text().splitlines()
    [line] = [line for line in lines if line.startswith(" slots qwen ")]
    assert len(lines) <= 30
    assert len(line) <= width
    if width >= 120:
        assert line.strip() in board.heartbeat_line(now_s)
        assert line.rstrip().endswith("ago: a better split")
