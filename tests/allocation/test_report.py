"""The learner's line to the allocator."""

from mrl.allocation.report import ReportSender
from mrl.records.codec import decode
from mrl.records.leases import LearnerReport, allocator_request_decoder

REPORT = LearnerReport(policy="qwen", trained_tokens=10, busy_s=1.0, data_wait_s=0.5)


def test_a_report_is_posted_at_once() -> None:
    """What is posted decodes to the report."""
    posted: list[bytes] = []
    sender = ReportSender()
    sender.open(posted.append, lambda: None)
    sender.report(REPORT)

    assert [decode(body, allocator_request_decoder) for body in posted] == [REPORT]


def test_a_link_without_answers_is_made_anew() -> None:
    """After 3 s without an acknowledgement, and again every 3 s; an acknowledgement ends it."""
    reconnects: list[None] = []
    sender = ReportSender()
    sender.open(lambda _: True, lambda: reconnects.append(None))
    for tenth in range(100):
        sender.on_tick(tenth / 10)
    assert len(reconnects) == 0

    sender.report(REPORT)
    for tenth in range(100, 170):
        sender.on_tick(tenth / 10)
    assert len(reconnects) == 2
    sender.on_message(b"")
    for tenth in range(170, 300):
        sender.on_tick(tenth / 10)
    assert len(reconnects) == 2
