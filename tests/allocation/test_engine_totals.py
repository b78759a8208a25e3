"""Increments of engines on units, and the points of their latency lines."""

from mrl.allocation.allocation_limits import LINE_SAMPLE_S
from mrl.allocation.engine_totals import EngineIncrement, EngineTotals, LineSample
from mrl.records.leases import LeaseRequest


def request(second: float, *, epoch: int = 7, rate: float = 10.0, full_answers: int = 0) -> LeaseRequest:
    """Of an engine with 4 answers in flight, of which 10 tokens a second come; a fifth are in groups not complete."""
    return LeaseRequest(
        holder="worker/a/0", policy="a", unit="cpu:0", unit_epoch=epoch, epoch=epoch, full_answers=full_answers,
        generated_tokens=int(0.8 * rate * second), slot_seconds=4.0 * second, active_s=second,
        sampled_tokens=int(rate * second),
    )  # fmt: skip


def test_a_first_word_is_no_use_and_later_ones_are_increments() -> None:
    uses = EngineTotals()
    assert uses.increment(request(10.0), 100.0) is None
    assert uses.increment(request(11.0, full_answers=3), 101.0) == EngineIncrement(8.0, 4.0, 3, None)


def test_a_point_of_the_line_spans_seconds_and_leaves_nothing_out() -> None:
    """However often the engine speaks; it counts what was sampled, not what was completed."""
    uses = EngineTotals()
    found = [uses.increment(request(tenth / 10), tenth / 10) for tenth in range(0, 201)]
    samples = [use.sample for use in found if use and use.sample]
    assert len(samples) == 20 / LINE_SAMPLE_S
    assert samples[0] == LineSample(LINE_SAMPLE_S, 5.0, 20.0, 50.0)
    assert sum(sample.tokens for sample in samples) == 200.0


def test_another_engine_on_the_unit_and_totals_that_went_back_begin_anew() -> None:
    uses = EngineTotals()
    uses.increment(request(100.0), 100.0)
    assert uses.increment(request(1.0, epoch=8), 101.0) is None
    assert uses.increment(request(2.0, epoch=8), 102.0) == EngineIncrement(8.0, 4.0, 0, None)
    assert uses.increment(request(1.0, epoch=8), 103.0) == EngineIncrement(8.0, 4.0, 0, None)
