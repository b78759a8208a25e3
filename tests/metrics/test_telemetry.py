"""What a role says about itself."""

import threading

import pytest

from mrl.metrics.telemetry import Telemetry
from mrl.records.codec import decode, encode
from mrl.records.host_messages import inbox_decoder
from mrl.records.telemetry_messages import (
    HeartbeatRecord,
    MetricsRecord,
    SampleRecord,
    Span,
    SpansRecord,
    TelemetryRecord,
)


class Time:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(sink: list[TelemetryRecord] | None = None) -> tuple[Telemetry, Time]:
    time = Time()
    records: list[TelemetryRecord] = [] if sink is None else sink
    return Telemetry("learner/qwen", "qwen", records.append, lambda: 1_700_000_000.0, monotonic=time, pid=7), time


def test_metrics_reach_the_sink_with_role_policy_step_and_time() -> None:
    """One call makes one record."""
    sink: list[TelemetryRecord] = []
    telemetry, _ = make(sink)
    telemetry.metrics(3, {"reward/mean": 1})
    telemetry.metrics(4, {"eval/accuracy/spell": 0.5}, policy="llama")
    first, second = sink
    assert first == MetricsRecord(
        role="learner/qwen", policy="qwen", step=3, time_unix_s=1_700_000_000.0, values={"reward/mean": 1.0}
    )
    assert isinstance(second, MetricsRecord)
    assert second.policy == "llama"


def test_an_unlisted_name_is_refused() -> None:
    """A metric that the table does not list never leaves the role."""
    sink: list[TelemetryRecord] = []
    telemetry, _ = make(sink)
    with pytest.raises(AssertionError, match="reward/typo"):
        telemetry.metrics(1, {"reward/mean": 0.0, "reward/typo": 1.0})
    assert sink == []


def test_long_samples_are_cut_to_what_the_record_accepts() -> None:
    """A sample of any length survives encoding and decoding."""
    sink: list[TelemetryRecord] = []
    telemetry, _ = make(sink)
    telemetry.sample(2, kind="rescue", task="spell", prompt="p" * 30_000, completion="é" * 30_000, reward=1, source="b")
    sample = decode(encode(sink[0]), inbox_decoder)
    assert isinstance(sample, SampleRecord)
    assert (len(sample.prompt), len(sample.completion), sample.source) == (20_000, 20_000, "b")


def test_heartbeat_tells_what_the_role_does_and_since_when() -> None:
    """`doing` sets the text; repeating it does not restart its duration."""
    telemetry, time = make()
    telemetry.doing("training")
    time.now_s += 2
    telemetry.doing("training")
    time.now_s += 1
    beat = telemetry.beat()
    assert beat == HeartbeatRecord(
        role="learner/qwen",
        policy="qwen",
        pid=7,
        time_unix_s=1_700_000_000.0,
        doing="training",
        awaiting="",
        whom="",
        for_s=3.0,
        bound_s=0.0,
        monotonic_s=time.now_s,
    )


def test_waits_nest_and_the_outer_one_shows_again() -> None:
    """The innermost wait shows with its own start; afterwards the outer one with its own."""
    telemetry, time = make()
    telemetry.doing("forming a batch")
    with telemetry.awaiting("groups", whom="worker/qwen/0", bound_s=300):
        time.now_s += 1
        with telemetry.awaiting("reply", whom="exchange", bound_s=5):
            time.now_s += 1
            inner = telemetry.beat()
        outer = telemetry.beat()
    after = telemetry.beat()
    assert (inner.awaiting, inner.whom, inner.for_s, inner.bound_s) == ("reply", "exchange", 1.0, 5)
    assert (outer.awaiting, outer.whom, outer.for_s, outer.bound_s) == ("groups", "worker/qwen/0", 2.0, 300)
    assert (after.doing, after.awaiting, after.whom, after.bound_s) == ("forming a batch", "", "", 0.0)


def test_a_wait_that_raises_is_over() -> None:
    """An exception inside a wait leaves the heartbeat as it was before, at every depth."""
    telemetry, _ = make()
    with telemetry.awaiting("groups", bound_s=1):
        with pytest.raises(KeyError), telemetry.awaiting("reply"):
            raise KeyError
        assert telemetry.beat().awaiting == "groups"
    with pytest.raises(TimeoutError), telemetry.awaiting("groups", bound_s=1):
        raise TimeoutError
    assert telemetry.beat().awaiting == ""


def test_beat_of_another_thread_sees_the_wait() -> None:
    """While the role is stuck in a wait, a second thread tells what it waits for."""
    telemetry, _ = make()
    beats: list[HeartbeatRecord] = []
    with telemetry.awaiting("weights", whom="learner/qwen"):
        thread = threading.Thread(target=lambda: beats.append(telemetry.beat()))
        thread.start()
        thread.join()
    assert beats[0].awaiting == "weights"


def test_waits_of_two_threads_end_in_any_order() -> None:
    """Ending the older of two equal waits leaves the younger one."""
    telemetry, time = make()
    older, younger = telemetry.awaiting("reply"), telemetry.awaiting("reply")
    older.__enter__()
    time.now_s += 5
    younger.__enter__()
    older.__exit__(None, None, None)
    assert (telemetry.beat().awaiting, telemetry.beat().for_s) == ("reply", 0.0)


def test_long_labels_survive_decoding() -> None:
    """Texts beyond the record's limit are cut, so that a heartbeat is never refused."""
    telemetry, _ = make()
    telemetry.doing("x" * 500)
    with telemetry.awaiting("y" * 500, whom="z" * 500):
        beat = decode(encode(telemetry.beat()), inbox_decoder)
    assert isinstance(beat, HeartbeatRecord)
    assert len(beat.doing) == len(beat.awaiting) == len(beat.whom) == 200


def spans_of(sink: list[TelemetryRecord]) -> list[Span]:
    return [span for record in sink if isinstance(record, SpansRecord) for span in record.spans]


def test_doings_and_waits_become_spans_and_the_innermost_wait_wins() -> None:
    """Each second of the role belongs to one span, dated in unix time; what still goes on is not told yet."""
    sink: list[TelemetryRecord] = []
    telemetry, time = make(sink)
    time.now_s += 1
    telemetry.doing("training")
    time.now_s += 2
    with telemetry.awaiting("groups", whom="workers of qwen"):
        time.now_s += 1
        with telemetry.awaiting("reply", whom="exchange"):
            time.now_s += 0.5
        time.now_s += 0.25
    telemetry.doing("evaluating", "qwen at step 3")
    assert telemetry.beat().doing == "evaluating qwen at step 3"
    time.now_s += 0.25
    telemetry.tell_spans()
    told = [
        (one.kind, one.whom, one.is_wait, one.began_unix_s - 1_700_000_000.0, one.duration_s) for one in spans_of(sink)
    ]
    assert told == [
        ("starting", "", False, -5.0, 1.0),
        ("training", "", False, -4.0, 2.0),
        ("awaiting groups", "workers of qwen", True, -2.0, 1.0),
        ("awaiting reply", "exchange", True, -1.0, 0.5),
        ("awaiting groups", "workers of qwen", True, -0.5, 0.25),
    ]
    telemetry.tell_spans()
    assert len(sink) == 1, "nothing new, no record"
    telemetry.tell_spans(is_last=True)
    assert (spans_of(sink)[-1].kind, spans_of(sink)[-1].whom) == ("evaluating", "qwen at step 3")
    assert isinstance(sink[0], SpansRecord)
    assert (sink[0].role, sink[0].policy) == ("learner/qwen", "qwen")


def test_what_another_thread_does_is_told_beside() -> None:
    """It neither ends nor hides what the role does itself, and is over when it raises."""
    sink: list[TelemetryRecord] = []
    telemetry, time = make(sink)

    def fail() -> None:
        time.now_s += 1
        raise KeyError

    with pytest.raises(KeyError), telemetry.beside("loading weights"):
        fail()
    assert telemetry.beat().doing == "starting"
    time.now_s += 1
    telemetry.doing("sampling")
    telemetry.tell_spans()
    told = [(one.kind, one.is_beside, one.duration_s) for one in spans_of(sink)]
    assert told == [("starting", False, 2.0), ("loading weights", True, 1.0)]


def test_any_number_of_long_spans_survives_decoding() -> None:
    """Texts beyond the record's limit are cut, and records hold as many spans as they may."""
    sink: list[TelemetryRecord] = []
    telemetry, time = make(sink)
    for number in range(1201):
        telemetry.doing(("x", "y")[number % 2] * 500, "z" * 500)
        time.now_s += 0.01
    for _ in range(3):
        telemetry.tell_spans()
    assert [len(decode(encode(record), inbox_decoder).spans) for record in sink] == [500, 500, 200]  # type: ignore[union-attr]
    assert {len(one.kind) for one in spans_of(sink)} == {200}
