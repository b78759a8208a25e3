"""A key speaks to an allocator for its own role, policy and workers."""

import pytest

from mrl.processes.lease_rights import may_send
from mrl.records.leases import LearnerReport, LeaseRequest, LeaseReturn
from mrl.records.unit_messages import NodeReport
from mrl.transport.grants import Grant

WORKER, LEARNER, SUPERVISOR = Grant("worker", "a"), Grant("learner", "a"), Grant("supervisor")


def report(policy: str) -> LearnerReport:
    """A learner's totals."""
    return LearnerReport(policy=policy, trained_tokens=1, busy_s=1.0, data_wait_s=0.0)


def request(holder: str, policy: str) -> LeaseRequest:
    """A worker's renewal."""
    return LeaseRequest(holder=holder, policy=policy, generated_tokens=0, slot_seconds=0.0, epoch=1)


@pytest.mark.parametrize(
    ("grant", "message", "is_allowed"),
    [
        (WORKER, request("worker/a/0", "a"), True),
        (WORKER, LeaseReturn(holder="worker/a/0", policy="a"), True),
        (WORKER, LeaseReturn(holder="worker/b/0", policy="a"), False),
        (WORKER, request("worker/b/0", "a"), False),
        (WORKER, request("worker/ab/0", "a"), False),
        (WORKER, request("worker/b/0", "b"), False),
        (WORKER, request("worker/a/0", "b"), False),
        (WORKER, report("a"), False),
        (LEARNER, report("a"), True),
        (LEARNER, report("b"), False),
        (LEARNER, request("worker/a/0", "a"), False),
        (LEARNER, request("learner/a", "a"), False),
        (SUPERVISOR, NodeReport(host="n1", life=0, units=[]), True),
        (WORKER, NodeReport(host="n1", life=0, units=[]), False),
        (SUPERVISOR, report("a"), False),
        (SUPERVISOR, LeaseReturn(holder="worker/a/0", policy="a"), False),
    ],
)
def test_nobody_speaks_for_others(grant, message, is_allowed):
    """A lease that another's worker gave back would be granted twice."""
    assert may_send(grant, message) is is_allowed
