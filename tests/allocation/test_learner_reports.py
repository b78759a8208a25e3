"""The learner's line to the allocator."""

from mrl.allocation.learner_reports import ReportSender
from mrl.records.codec import decode
from mrl.records.leases import LearnerReport, allocator_request_decoder

REPORT = LearnerReport(policy="qwen", trained_tokens=10, busy_s=1.0, data_wait_s=0.5)


def test_a_report_is_posted_at_once() -> None:
    """What is posted decodes to the report."""
    posted: list[bytes] = []
    sender = ReportSender("qwen")
    sender.requests.open(posted.append, lambda: None)
    sender.report(REPORT)

    assert [decode(body, allocator_request_decoder) for body in posted] == [REPORT]


def test_a_beat_says_the_newest_totals_again_at_most_once_a_second() -> None:
    """Before the first report it says zeros, so that a learner is heard of while it waits for its first batch."""
    posted: list[bytes] = []
    now_s = [0.0]
    sender = ReportSender("qwen", clock=lambda: now_s[0])
    sender.requests.open(posted.append, lambda: None)
    for tenth in range(25):
        now_s[0] = tenth / 10
        sender.beat()
    sender.report(REPORT)
    for tenth in range(25, 40):
        now_s[0] = tenth / 10
        sender.beat()

    nothing = LearnerReport(policy="qwen", trained_tokens=0, busy_s=0.0, data_wait_s=0.0)
    said = [decode(body, allocator_request_decoder) for body in posted]
    assert said == [nothing, nothing, nothing, REPORT, REPORT]


def test_a_link_without_answers_is_made_anew() -> None:
    """After 3 s without an acknowledgement, and again every 3 s; an acknowledgement ends it."""
    reconnects: list[None] = []
    now_s = [0.0]
    sender = ReportSender("qwen", clock=lambda: now_s[0])
    sender.requests.open(lambda _: True, lambda: reconnects.append(None))

    def ticks(first: int, last: int) -> int:
        for tenth in range(first, last):
            now_s[0] = tenth / 10
            sender.requests.on_tick(now_s[0])
        return len(reconnects)

    assert ticks(0, 100) == 0
    sender.report(REPORT)
    assert ticks(100, 170) == 2
    sender.on_message(b"")
    assert ticks(170, 300) == 2
