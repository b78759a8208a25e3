"""Rights of keys to messages to the allocator: a learner reports its own totals, a worker asks for its own lease."""

from mrl.records.leases import LearnerReport, UnitRequest
from mrl.records.unit_messages import NodeReport
from mrl.transport.grants import Grant


def may_send(grant: Grant, message: UnitRequest) -> bool:
    """Whether a message names the role, the policy and the worker of the key under which it was sent."""
    if isinstance(message, NodeReport):
        return grant.role == "supervisor"
    if isinstance(message, LearnerReport):
        return grant == Grant("learner", message.policy)
    return grant == Grant("worker", message.policy) and grant.covers(message.holder)
