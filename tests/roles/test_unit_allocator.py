"""The loop of the allocator of units: who may say what, what it writes down."""

import json

from mrl.allocation.units import Transition, UnitState
from mrl.records.leases import LearnerReport
from mrl.records.units import NodeReport
from mrl.roles.unit_allocator import _lines, _may_say
from mrl.transport.grants import Grant


def test_nodes_speak_for_units_and_policies_for_themselves() -> None:
    node = NodeReport(host="node", life=1, units=[], released=["a"])
    report = LearnerReport(policy="a", trained_tokens=1, busy_s=1.0, data_wait_s=0.0)
    assert [_may_say(grant, node) for grant in (Grant("supervisor"), Grant("worker", "a"))] == [True, False]
    grants = (Grant("learner", "a"), Grant("learner", "b"), Grant("supervisor"))
    assert [_may_say(grant, report) for grant in grants] == [True, False, False]


def test_transitions_are_written_one_a_line_with_the_time_of_day() -> None:
    [line] = _lines([Transition(0.0, "cpu:0", 7, "a", UnitState.GRANTED, "wanted")])
    row = json.loads(line)
    assert row.pop("time_unix_s") > 0
    assert row == {"unit": "cpu:0", "epoch": 7, "policy": "a", "state": "granted", "why": "wanted"}
