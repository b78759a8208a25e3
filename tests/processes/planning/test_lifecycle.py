"""Phases of a run and the signals that end it, without any process."""

import signal

from mrl.processes.planning.lifecycle import Lifecycle


def life(**changes: float) -> Lifecycle:
    values = {"stop_s": 5.0, **changes}
    return Lifecycle(learners=frozenset({"learner/a", "learner/b"}), **values)  # type: ignore[arg-type]


def test_a_run_ends_once_all_learners_are_done() -> None:
    """With 0 and no reason; a host whose own learners are done waits for the word of the first."""
    run = life()
    run.finished("learner/a", 1.0)
    run.tick(1.5)
    assert run.phase == "running"
    run.finished("learner/b", 2.0)
    assert run.phase == "draining"
    run.tick(3.0)
    assert (run.phase, run.exit_code, run.reason) == ("stopping", 0, "")


def test_sigterm_first_and_sigkill_after_the_patience() -> None:
    """No signal while running, SIGTERM at once, SIGKILL after stop_s."""
    run = life()
    assert run.due_signal(9.0) is None
    run.interrupted(signal.SIGINT, 10.0)
    assert [run.due_signal(at_s) for at_s in (10.0, 14.9, 15.0)] == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
    assert run.exit_code == 130


def test_a_second_signal_ends_the_patience() -> None:
    """Ctrl-C twice kills at once; the exit code stays that of the first."""
    run = life()
    run.interrupted(signal.SIGINT, 10.0)
    run.interrupted(signal.SIGTERM, 11.1)
    assert (run.due_signal(11.1), run.exit_code) == (signal.SIGKILL, 130)


def test_one_signal_that_comes_on_two_ways_is_one() -> None:
    """A batch system signals every process of a job, and the batch script hands the signal on as well."""
    run = life()
    run.interrupted(signal.SIGTERM, 10.0)
    run.interrupted(signal.SIGTERM, 10.3)
    assert run.due_signal(10.4) == signal.SIGTERM


def test_another_host_gets_longer() -> None:
    """Its supervisor first gives its own processes their time."""
    run = life()
    run.end(0, "", 10.0)
    assert (run.due_signal(15.5), run.due_signal(15.5, extra_s=3.0)) == (signal.SIGKILL, signal.SIGTERM)
    assert run.due_signal(18.0, extra_s=3.0) == signal.SIGKILL


def test_a_stopped_policy_counts_as_done_and_is_not_started_again() -> None:
    """The others go on; when it was the last one the run drains. A frozen policy has no learner to be done."""
    run = life()
    run.stop("a", 1.0)
    assert (run.phase, run.stopped, run.done) == ("running", {"a"}, {"learner/a"})
    assert not run.restarts("learner", "a")
    assert not run.restarts("worker", "a")
    assert run.restarts("worker", "b")
    assert run.restarts("exchange", "")
    run.stop("teacher", 2.0)
    assert run.done == {"learner/a"}
    run.stop("b", 3.0)
    assert run.phase == "draining"
    assert run.restarts("supervisor", "")


def test_the_first_reason_is_told() -> None:
    """What fails because the run is ending does not replace why it ends."""
    run = life()
    run.end(1, "exchange gave up", 1.0)
    run.end(2, "later", 2.0)
    run.finished("learner/a", 3.0)
    assert (run.exit_code, run.reason) == (1, "exchange gave up")


def test_the_time_limit_counts_from_the_start() -> None:
    """run.max_minutes is a plan: exit code 0."""
    run = life(max_run_s=60.0, started_s=100.0)
    run.tick(159.0)
    assert run.phase == "running"
    run.tick(161.0)
    assert (run.phase, run.exit_code) == ("stopping", 0)


def test_only_what_is_still_needed_is_started_again() -> None:
    """Workers of a finished learner are not, other hosts are until the end, nothing is while stopping."""
    run = life()
    run.finished("learner/a", 1.0)
    assert not run.restarts("worker", "a")
    assert run.restarts("worker", "b")
    run.finished("learner/b", 1.0)
    assert run.restarts("supervisor", "")
    assert not run.restarts("exchange", "")
    run.end(0, "", 2.0)
    assert not run.restarts("supervisor", "")


def test_ranks_on_another_host_are_not_started_again_for_a_learner_that_is_done() -> None:
    """Its first rank has finished, or was stopped; those of the other learner are."""
    run = life()
    assert run.restarts("learner", "a")
    run.finished("learner/a", 1.0)
    assert [run.restarts("learner", policy) for policy in ("a", "b")] == [False, True]
