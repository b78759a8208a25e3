"""Spans: few of them, in order, with the sums of every kind right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.metrics.time_spans import MAX_KEPT, PIECE_S, SHORT_S, Activity, EndedSpan, Lane, SpanRecorder

A, B, C = Activity("sampling"), Activity("delivering"), Activity("awaiting work", "learner/qwen", is_wait=True)


def filled(*parts: tuple[Activity, float], gap_s: float = 0.0) -> tuple[Lane, float]:
    """A lane of these activities one behind the other, and when the last one ended."""
    lane, now_s = Lane(), 100.0
    for activity, duration_s in parts:
        lane.add(activity, now_s, now_s + duration_s)
        now_s += duration_s + gap_s
    return lane, now_s - gap_s


def told(lane: Lane) -> list[tuple[Activity, float, float]]:
    return [(one.activity, round(one.began_s - 100.0, 6), round(one.duration_s, 6)) for one in lane.ended]


def test_long_spans_stand_as_they_were() -> None:
    """One behind the other, each with its own beginning."""
    lane, _ = filled((A, 1.0), (C, 0.5), (A, 2.0))
    assert told(lane) == [(A, 0.0, 1.0), (C, 1.0, 0.5), (A, 1.5, 2.0)]


def test_neighbours_of_one_kind_are_joined_up_to_a_piece() -> None:
    """A loop that says the same again and again makes a line per piece."""
    lane, end_s = filled(*[(A, 1.0)] * 12)
    assert told(lane) == [(A, 0.0, PIECE_S), (A, 5.0, PIECE_S), (A, 10.0, 2.0)]
    lane.add(Activity("sampling", "another"), end_s, end_s + 1.0)
    assert len(told(lane)) == 4


def test_what_is_short_is_lent_to_the_span_before_and_comes_back() -> None:
    """Each time 1 ms of the other kind: after five times it has a span of its own, and the sums are right."""
    lane, _ = filled(*[(A, 0.1), (B, 0.001)] * 5)
    assert told(lane) == [(A, 0.0, 0.5), (B, 0.5, 0.005)]


def test_what_was_lent_comes_back_from_the_kind_that_had_it() -> None:
    """A kind that follows four times out of five is not paid by the fifth."""
    lane, _ = filled(*([(C, 0.1), (B, 0.002)] * 2 + [(A, 0.006), (B, 0.002)]) * 3)
    sums = [round(sum(one.duration_s for one in lane.ended if one.activity == kind), 6) for kind in (A, B, C)]
    assert sums == [0.018, 0.018, 0.6]


def test_a_gap_is_not_filled() -> None:
    """What a lane beside did with pauses between stays apart, unless the pause is short."""
    apart, _ = filled((A, 0.001), (A, 0.001), gap_s=0.006)
    close, _ = filled((A, 0.001), (A, 0.001), gap_s=0.003)
    assert told(apart) == [(A, 0.0, 0.001), (A, 0.007, 0.001)]
    assert told(close) == [(A, 0.0, 0.002)]


@given(parts=st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 12)), max_size=200))
def test_no_loop_is_so_fast_that_sums_go_wrong_or_lines_become_many(parts: list[tuple[Activity, int]]) -> None:
    """Spans cover all the time in order and without overlap; per kind less than a short one is missing at the end."""
    lane, end_s = filled(*[(activity, number / 1000) for activity, number in parts])
    spans = lane.ended
    places = [100.0, *(one.ended_s for one in spans)]
    assert [one.began_s for one in spans] == pytest.approx(places[:-1])
    assert places[-1] == pytest.approx(end_s)
    assert len(spans) <= 2 + 2 * (end_s - 100.0) / SHORT_S
    for kind in (A, B, C):
        true_s = sum(number for activity, number in parts if activity == kind) / 1000
        assert sum(one.duration_s for one in spans if one.activity == kind) == pytest.approx(true_s, abs=3 * SHORT_S)


def test_what_nobody_takes_is_bounded() -> None:
    """The newest are kept, and taken oldest first."""
    lane, _ = filled(*[(A, 1.0), (C, 1.0)] * MAX_KEPT)
    taken = lane.take(3)
    assert [one.began_s for one in taken] == [100.0 + MAX_KEPT, 101.0 + MAX_KEPT, 102.0 + MAX_KEPT]
    assert len(lane.ended) == MAX_KEPT - 3


def test_what_goes_on_is_told_in_pieces() -> None:
    """A wait that never ends shows every few seconds, own or beside; not before, unless it is the last word."""
    spans = SpanRecorder(A, 0.0)
    spans.turn_to(C, 1.0)
    spans.begin("loading weights", 2.0)
    assert spans.take(5.9, 100) == ([EndedSpan(A, 0.0, 1.0)], [])
    assert spans.take(7.0, 100) == ([EndedSpan(C, 1.0, 6.0)], [EndedSpan(Activity("loading weights"), 2.0, 5.0)])
    assert spans.take(8.0, 100) == ([], [])
    assert spans.take(9.0, 100, is_last=True) == (
        [EndedSpan(C, 7.0, 2.0)],
        [EndedSpan(Activity("loading weights"), 7.0, 2.0)],
    )


def test_things_beside_overlap_one_another() -> None:
    """Two threads at once: each thing has its own beginning and end."""
    spans = SpanRecorder(A, 0.0)
    loading, verifying = spans.begin("loading", 1.0), spans.begin("verifying", 2.0)
    spans.end(loading, 3.0)
    spans.end(verifying, 4.0)
    spans.end(spans.begin("loading", 5.0), 6.0)
    loaded, verified = Activity("loading"), Activity("verifying")
    assert spans.take(4.0, 100)[1] == [
        EndedSpan(loaded, 1.0, 2.0),
        EndedSpan(loaded, 5.0, 1.0),
        EndedSpan(verified, 2.0, 2.0),
    ]


def test_a_record_has_room_for_so_many_spans_and_the_rest_comes_next() -> None:
    """Own spans first."""
    spans = SpanRecorder(A, 0.0)
    for number in range(1, 5):
        spans.turn_to((A, C)[number % 2], float(number))
    spans.end(spans.begin("load", 1.0), 2.0)
    assert [len(part) for part in spans.take(4.0, 3)] == [3, 0]
    assert [len(part) for part in spans.take(4.0, 3)] == [1, 1]
