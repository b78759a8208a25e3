"""The node's guard: when an engine may start, who has to go first, and when a unit is called empty."""

from mrl.allocation.guard import Action, NodeGuard
from mrl.records.units import NodeOrders, UnitOrder, UnitReport

UNIT = "gpu:0"


class Node:
    """A guard and whether its one unit is empty."""

    def __init__(self) -> None:
        self.guard = NodeGuard("here", [UNIT])
        self.empty = True

    def told(self, kind: str, epoch: int, policy: str = "", *, life: int = 1, now_s: float = 0.0) -> list[Action]:
        order = UnitOrder(unit=UNIT, epoch=epoch, kind=kind, policy=policy, grace_s=2.0)  # type: ignore[arg-type]
        return self.guard.obey(NodeOrders(life=life, orders=[order]), now_s)

    def step(self, now_s: float = 0.0) -> list[Action]:
        actions = self.guard.step(now_s, lambda unit: self.empty)
        if any(action.kind == "start" for action in actions):
            self.empty = False
        return actions

    @property
    def report(self) -> UnitReport:
        return self.guard.report().units[0]


def running(epoch: int = 5, policy: str = "a") -> Node:
    node = Node()
    node.told("start", epoch, policy)
    assert node.step() == [Action("start", UNIT, epoch, policy)]
    return node


def test_a_start_is_admitted_once_and_reported() -> None:
    """The same order again changes nothing, before and after the start."""
    node = Node()
    node.told("start", 5, "a")
    assert (node.report.epoch, node.report.resident_epoch, node.report.resident_policy) == (5, 5, "a")
    node.told("start", 5, "a")
    assert node.step() == [Action("start", UNIT, 5, "a")]
    node.told("start", 5, "a")
    assert node.step() == []
    assert node.guard.num_refused == 0


def test_a_start_under_an_epoch_that_is_not_new_is_refused() -> None:
    """Nor is the same epoch for another policy new."""
    node = running(5, "a")
    node.told("start", 4, "b")
    node.told("start", 5, "b")
    assert node.step() == []
    assert node.guard.num_refused == 2
    assert node.report.resident_policy == "a"


def test_who_is_there_is_killed_before_another_starts() -> None:
    """And the start waits until the unit is seen empty, however long that takes."""
    node = running(5, "a")
    node.told("start", 6, "b")
    assert node.step() == node.step() == [Action("kill", UNIT)]
    node.empty = True
    assert node.step() == [Action("start", UNIT, 6, "b")]


def test_what_nobody_started_is_killed_too() -> None:
    """A guard that has been started again remembers nothing, and looks all the same."""
    node = Node()
    node.empty = False
    node.told("start", 6, "b")
    assert node.step() == [Action("kill", UNIT)]


def test_an_engine_is_asked_to_end_once_and_killed_after_its_grace() -> None:
    """Repeated orders do not put the end off."""
    node = running()
    assert node.told("end", 5, now_s=10.0) == [Action("end", UNIT, 5)]
    assert node.told("end", 5, now_s=11.5) == []
    assert node.step(11.9) == []
    assert node.step(12.0) == [Action("kill", UNIT)]
    node.empty = True
    assert node.step(12.1) == []
    assert (node.report.epoch, node.report.resident_epoch, node.report.cleared_epoch) == (5, 0, 0)


def test_an_order_to_end_that_means_another_engine_is_ignored() -> None:
    """It is about an older lease."""
    node = running(5)
    assert node.told("end", 4) == []
    assert node.step(99.0) == []


def test_clearing_kills_proves_and_refuses_older_starts_from_then_on() -> None:
    """The word is given only when the unit was seen empty."""
    node = running(5)
    node.told("clear", 5)
    assert node.step() == [Action("kill", UNIT)]
    assert node.report.cleared_epoch == 0
    node.empty = True
    assert node.step() == []
    assert (node.report.cleared_epoch, node.report.resident_epoch) == (5, 0)
    node.told("start", 5, "a")
    assert node.step() == []


def test_a_start_that_waits_is_dropped_by_a_clear_of_its_epoch() -> None:
    """It would start what is to be gone."""
    node = running(5, "a")
    node.told("start", 6, "b")
    node.told("clear", 6)
    node.step()
    node.empty = True
    assert node.step() == []
    assert node.report.cleared_epoch == 6


def test_clearing_an_older_epoch_leaves_a_newer_engine_alone() -> None:
    """It started on an empty unit, which is proof enough."""
    node = running(6)
    node.told("clear", 5)
    assert node.step() == []
    assert (node.report.cleared_epoch, node.report.resident_epoch) == (5, 6)


def test_an_engine_that_ended_by_itself_is_seen() -> None:
    """The report then names no resident under the same epoch."""
    node = running(5)
    node.empty = True
    node.step()
    assert (node.report.epoch, node.report.resident_epoch) == (5, 0)


def test_the_dead_allocator_is_not_obeyed() -> None:
    """Once its successor was heard; units that do not exist are refused as well."""
    node = Node()
    node.guard.obey(NodeOrders(life=2, orders=[]), 0.0)
    node.told("start", 5, "a", life=1)
    assert node.step() == []
    node.guard.obey(NodeOrders(life=2, orders=[UnitOrder(unit="gpu:9", epoch=9, kind="start", policy="a")]), 0.0)
    assert node.guard.num_refused == 2
    assert node.guard.report(["b"]).released == ["b"]
