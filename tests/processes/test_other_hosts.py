"""What the first host makes of the reports of others: orders, sessions, losses. No process, no socket."""

from pathlib import Path
from typing import Any

from mrl.config.schema import LaunchTable
from mrl.processes.other_hosts import OtherHosts
from mrl.processes.planning.hosts import Host
from mrl.processes.planning.lifecycle import Lifecycle
from mrl.processes.planning.plan import Plan, ProcessSpec
from mrl.records.host_messages import HostReport

LEARNERS = ("learner/a", "learner/b")


class Said:
    """What a person would see."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, text: str, now_s: float) -> None:
        self.texts.append(text)

    def line(self, text: str) -> None:
        self.texts.append(text)


class World:
    """Two hosts; policy b lives on the second."""

    def __init__(self, *, unit_hosts: tuple[str, ...] = (), **table: Any) -> None:
        specs = [
            ProcessSpec(name=name, role="learner", policy=name[-1], index=0, argv=(), host=host, restart="until_done")
            for name, host in zip(LEARNERS, ("h0", "h1"), strict=True)
        ]
        self.lifecycle = Lifecycle(learners=frozenset(LEARNERS), stop_s=5.0)
        self.said = Said()
        hosts = (Host("h0"), Host("h1", "10.0.0.2"), *map(Host, unit_hosts))
        plan = Plan(tuple(specs), hosts, frozenset(unit_hosts))
        self.hosts = OtherHosts(
            plan, LaunchTable(**table), self.lifecycle, self.said, attempt=Path("attempt_2").name, now_s=0.0
        )

    def report(self, session: str, now_s: float, **fields: Any) -> str:
        return self.hosts.answer(HostReport(host="h1", session=session, **fields), now_s).phase


def test_a_host_is_told_how_the_run_stands() -> None:
    """Phase, logs, hosts, what is done and what was stopped."""
    world = World()
    world.lifecycle.stop("a", 0.5)
    order = world.hosts.answer(HostReport(host="h1", session="s"), 1.0)
    assert (order.phase, order.attempt, order.hosts) == ("running", "attempt_2", ["h0", "h1=10.0.0.2"])
    assert (order.done, order.stopped) == (["learner/a"], ["a"])
    assert world.said.texts == ["host h1 has joined"]


def test_what_a_host_reports_counts_for_the_run() -> None:
    """Its finished learners, stopped policies that are gone, and lines; a stranger's report counts for nothing."""
    world = World()
    world.lifecycle.stop("b", 0.5)
    world.hosts.answer(HostReport(host="h9", session="s", done=["learner/a"]), 1.0)
    assert world.lifecycle.phase == "running"
    assert world.hosts.have_ended("b"), "it has not joined"
    world.report("s", 1.0, done=["learner/a"], lines=["worker/b/0 fell"])
    assert world.lifecycle.phase == "draining"
    assert not world.hosts.have_ended("b")
    world.report("s", 1.0, ended=["b"])
    assert world.hosts.have_ended("b")
    assert not world.hosts.have_ended("a")
    assert "[h1] worker/b/0 fell" in world.said.texts


def test_a_host_that_cannot_go_on_ends_the_run_with_its_reason() -> None:
    """Its exit code and reason are those of the run."""
    world = World()
    assert world.report("s", 1.0, end_code=2, end_reason="learner/b: bad model") == "stopping"
    assert (world.lifecycle.exit_code, world.lifecycle.reason) == (2, "h1: learner/b: bad model")


def test_a_second_session_of_a_host_waits_until_the_first_is_over() -> None:
    """Two supervisors of one host would start every learner twice. One that is silent has ended itself."""
    world = World(alone_s=10.0)
    assert world.report("old", 1.0) == "running"
    assert world.report("new", 2.0) == "wait"
    assert world.report("new", 18.9) == "wait"
    assert world.report("new", 19.1) == "running", "10 s alone, 5 s to stop, 3 s margin"
    assert world.report("old", 19.2) == "wait"
    assert world.said.texts[-1] == "host h1 is back"
    assert world.report("new", 20.0, is_over=True) == "running"
    assert world.report("third", 20.1) == "running"


def test_a_host_that_joins_by_itself_is_awaited_with_a_bound() -> None:
    """At the start and after a loss; one that the first host starts is a child of it, which has bounds of its own."""
    world = World(hosts_join=True, join_s=60.0)
    world.hosts.tick(59.0)
    world.report("s", 59.0)
    world.hosts.tick(118.0)
    assert world.lifecycle.phase == "running"
    world.hosts.tick(120.0)
    assert (world.lifecycle.exit_code, world.lifecycle.phase) == (1, "stopping")
    assert world.lifecycle.reason == "no report for launch.join_s = 60 s from host h1"
    started = World(join_s=60.0)
    started.hosts.tick(1000.0)
    assert started.lifecycle.phase == "running"


def test_a_host_of_nothing_but_units_that_is_lost_does_not_end_the_run() -> None:
    """It is told once, and again after it was back; one with a learner that is lost beside it ends the run."""
    world = World(hosts_join=True, join_s=60.0, unit_hosts=("n2",))
    world.report("s", 59.0)
    for now_s in (61.0, 62.0):
        world.hosts.tick(now_s)
    assert world.lifecycle.phase == "running"
    missed = "host n2 has not reported for launch.join_s = 60 s; the run continues without it"
    assert world.said.texts == ["host h1 has joined", missed]
    world.hosts.answer(HostReport(host="n2", session="t"), 63.0)
    world.report("s", 110.0)
    world.hosts.tick(124.0)
    assert world.said.texts[2:] == ["host n2 has joined", missed]
    world.hosts.tick(171.0)
    assert world.lifecycle.reason == "no report for launch.join_s = 60 s from host h1"


def test_the_end_waits_for_hosts_that_speak() -> None:
    """One that says it is over, was never there, or is silent holds nobody up."""
    world = World()
    assert world.hosts.are_over(1.0)
    world.report("s", 1.0)
    assert not world.hosts.are_over(3.9)
    assert world.hosts.are_over(4.1)
    world.report("s", 5.0, is_over=True)
    assert world.hosts.are_over(5.0)
