"""The loop of the allocator of units: its lives, who may say what, what it writes down."""

import json
from pathlib import Path

import pytest

from mrl.allocation.units import Transition, UnitState
from mrl.errors import RunFolderError
from mrl.records.leases import LearnerReport
from mrl.records.units import NodeReport
from mrl.roles.unit_allocator import _lines, _may_say, next_life
from mrl.transport.grants import Grant


def test_every_allocator_of_a_run_has_a_number_of_its_own(tmp_path: Path) -> None:
    """Larger than those before it."""
    assert [next_life(tmp_path / "allocator.json") for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("content", ["", "{", '{"life": 0}', '{"life": "2"}', '{"life": 2, "run": "other"}'])
def test_a_count_that_cannot_be_read_is_one_clear_line(tmp_path: Path, content: str) -> None:
    """Beginning again at 1 could use epochs that are in use."""
    (tmp_path / "allocator.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"allocator.json: the count of allocators cannot be kept"):
        next_life(tmp_path / "allocator.json")
    assert (tmp_path / "allocator.json").read_text() == content


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
