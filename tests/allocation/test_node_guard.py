"""The node's guard: when an engine may start, who has to go first, and when a unit is called empty."""

from mrl.allocation.node_guard import Action, NodeGuard, Seen
from mrl.records.unit_messages import NodeOrders, UnitOrder, UnitReport

UNIT = "gpu:0"


class Node:
    """A guard, whether its one unit is quiet, and of which policies engines sleep there."""

    def __init__(self) -> None:
        self.guard = NodeGuard("here", [UNIT], wake_s=3.0)
        self.empty = True
        self.asleep: frozenset[str] = frozenset()

    def told(self, kind: str, epoch: int, policy: str = "", *, life: int = 1, now_s: float = 0.0) -> list[Action]:
        order = UnitOrder(unit=UNIT, epoch=epoch, kind=kind, policy=policy, grace_s=2.0)  # type: ignore[arg-type]
        return self.guard.obey(NodeOrders(life=life, orders=[order]), now_s)

    def step(self, now_s: float = 0.0) -> list[Action]:
        actions = self.guard.step(now_s, lambda unit: Seen(self.empty, self.asleep))
        if any(action.kind in ("start", "wake") for action in actions):
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


def test_a_start_under_an_epoch_that_is_not_new_is_refused() -> None:
    """Nor is the same epoch for another policy new."""
    node = running(5, "a")
    node.told("start", 4, "b")
    node.told("start", 5, "b")
    assert node.step() == []
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
    assert node.told("end", 5, now_s=10.0) == [Action("end", UNIT, 5, "a")]
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
    unknown = NodeOrders(life=2, orders=[UnitOrder(unit="gpu:9", epoch=9, kind="start", policy="a")])
    assert node.guard.obey(unknown, 0.0) == node.step() == []
    assert node.guard.report(["b"]).released == ["b"]


def asleep_beside(policy: str = "b") -> Node:
    """a fell asleep under epoch 5; then an engine of another policy was started under epoch 6."""
    node = running(5, "a")
    assert node.told("sleep", 5) == [Action("sleep", UNIT, 5, "a")]
    node.empty, node.asleep = True, frozenset("a")
    assert node.step() == []
    node.told("start", 6, policy)
    assert node.step() == [Action("start", UNIT, 6, policy)]
    return node


def test_an_engine_that_sleeps_is_no_resident_and_hinders_nobody() -> None:
    """It is reported as gone, and the unit as cleared."""
    node = running(5, "a")
    assert node.told("sleep", 5) == [Action("sleep", UNIT, 5, "a")]
    assert node.told("sleep", 5) == [], "it is asked once"
    assert node.report.resident_epoch == 5, "it may not sleep yet"
    node.empty, node.asleep = True, frozenset("a")
    node.told("clear", 5)
    assert node.step() == []
    assert (node.report.resident_epoch, node.report.cleared_epoch) == (0, 5)


def test_what_does_not_fall_asleep_in_time_is_killed() -> None:
    node = running(5, "a")
    node.told("sleep", 5, now_s=1.0)
    assert node.step(2.9) == []
    assert node.step(3.0) == [Action("kill", UNIT)]


def test_one_that_is_to_sleep_can_still_be_told_to_end() -> None:
    """And not the other way round."""
    node = running(5, "a")
    node.told("sleep", 5)
    assert node.told("end", 5) == [Action("end", UNIT, 5, "a")]
    assert node.told("sleep", 5) == node.told("end", 5) == []


def test_a_sleeper_is_woken_under_a_new_epoch_once_the_other_is_gone() -> None:
    """Until then nothing wakes it, and an old epoch never does."""
    node = asleep_beside()
    node.told("start", 5, "a")
    assert node.guard.units[UNIT].admitted is None
    node.told("start", 7, "a")
    assert node.step() == [Action("kill", UNIT)]
    node.empty = True
    assert node.step() == [Action("wake", UNIT, 7, "a")]
    assert (node.report.resident_epoch, node.report.resident_policy) == (7, "a")


def test_a_sleeper_that_has_died_is_started_anew() -> None:
    node = asleep_beside()
    node.told("start", 7, "a")
    node.empty, node.asleep = True, frozenset()
    assert node.step() == [Action("start", UNIT, 7, "a")]


def test_a_sleeper_that_does_not_wake_up_in_time_is_killed() -> None:
    """Only its own word under the new epoch counts."""
    node = asleep_beside()
    node.told("start", 7, "a")
    node.empty = True
    assert node.step(10.0) == [Action("wake", UNIT, 7, "a")]
    node.guard.woke(UNIT, 5)
    assert node.step(13.0) == [Action("kill", UNIT)]


def test_a_sleeper_that_woke_up_lives_until_it_is_asked_to_go() -> None:
    """A word that comes after that does not save it."""
    node = asleep_beside()
    node.told("start", 7, "a")
    node.empty = True
    node.step(10.0)
    node.guard.woke(UNIT, 7)
    assert node.step(100.0) == []
    node.told("sleep", 7, now_s=100.0)
    node.guard.woke(UNIT, 7)
    assert node.step(102.0) == [Action("kill", UNIT)]
