"""Verifier processes against verifiers that really hang, die and eat memory."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing

import psutil
import pytest

from mrl.errors import RoleFailed
from mrl.tasks import verifier_pool
from mrl.tasks.rewards import Outcome
from mrl.tasks.verifier_pool import MAX_REQUEST_BYTES, VerifierPool
from mrl.tasks.verifier_process import VerifierCall

RIGHT, WRONG = Outcome.of(1.0), Outcome.of(0.0)
pytestmark = pytest.mark.usefixtures("verifiers")


def make_pool(**settings) -> VerifierPool:
    """One process with 256 MiB, and time enough for every answer that ends by itself, however loaded the machine."""
    settings = {"processes": 1, "timeout_s": 60.0, "memory_bytes": 256 * 1024**2} | settings
    return VerifierPool("tests.support.hard_verifiers:by_text", **settings)


def outcomes(pool: VerifierPool, *answers: str) -> list[Outcome]:
    """What the pool says; "right" is right."""
    return pool.submit([VerifierCall("right", answer) for answer in answers]).result()


def is_failure(outcome: Outcome, kind: str) -> bool:
    """Whether it is one of this kind, and says how it came."""
    return outcome.failure == kind and not outcome.rewards and bool(outcome.words)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [("loop", "timeout"), ("regex", "timeout"), ("die", "exited"), ("leave", "exited"), ("eat", "memory"),
     ("raise", "raised"), ("nothing", "no_number"), ("nan", "not_finite"), ("x" * MAX_REQUEST_BYTES, "too_long")],
)  # fmt: skip
def test_a_bad_answer_costs_itself_only(answer, failure):
    """The answers before and behind it are judged, in order, by processes that work."""
    limits = {"timeout_s": 0.5, "wall_factor": 100.0} if failure == "timeout" else {}
    with closing(make_pool(**limits)) as pool:
        before, failed, *behind = outcomes(pool, "right", answer, "right", "wrong")
        assert [before, *behind] == [RIGHT, RIGHT, WRONG]
        assert is_failure(failed, failure)
        assert pool.counts.answers == 4
        assert pool.counts.failures == {failure: 1}
        assert outcomes(pool, "right") == [RIGHT]


def test_a_long_answer_is_judged():
    """Longer than a pipe holds: the process takes it in parts."""
    long = "right" * 500_000
    with closing(make_pool()) as pool:
        asked = [VerifierCall(long, long), VerifierCall("right", long), VerifierCall("", "right")]
        assert pool.submit(asked).result() == [RIGHT, WRONG, WRONG]


@pytest.mark.parametrize(("number", "failure"), [(signal.SIGKILL, "exited"), (None, "timeout")])
def test_a_process_that_takes_half_of_a_long_answer_is_not_waited_for(number, failure):
    """It ends, or stands still, and nothing of it is watched any more."""
    with closing(make_pool(timeout_s=2.0, wall_factor=1.0) if number is None else make_pool()) as pool:
        outcomes(pool, "right")
        (child,) = pool._children
        os.kill(child.process.pid, signal.SIGSTOP)
        judging = pool.submit([VerifierCall("", "long" * 500_000)])
        while not (child.unsent or judging.done()):
            time.sleep(0.01)
        if number is not None:
            os.kill(child.process.pid, number)
        (outcome,) = judging.result()
        assert is_failure(outcome, failure)
        assert len(pool._selector.get_map()) == 1, "what wakes the pool"


def test_a_verifier_that_waits_without_using_cpu_is_ended_too():
    """Sleep uses no CPU time; the limit of the wall clock, a multiple, ends it."""
    with closing(make_pool(timeout_s=0.5)) as pool:
        late, right = outcomes(pool, "sleep", "right")
        assert is_failure(late, "timeout")
        assert right == RIGHT
        assert pool.counts.failures == {"timeout": 1}


def test_the_limit_is_cpu_time():
    """A loop is ended by the limit of its own process, however patient the clock of a loaded machine is."""
    with closing(make_pool(timeout_s=0.5, wall_factor=1000.0)) as pool:
        late, right = outcomes(pool, "loop", "right")
        assert is_failure(late, "timeout")
        assert right == RIGHT


def test_many_answers_over_several_processes_come_back_in_order():
    """More answers than processes, failures among them."""
    answers = ["right", "wrong", "die", "right"] * 10
    with closing(make_pool(processes=3)) as pool:
        found = outcomes(pool, *answers)
        assert all(is_failure(one, "exited") for one in found[2::4])
        assert [one for one in found if not one.failure] == [RIGHT, WRONG, RIGHT] * 10
        assert pool.counts.failures == {"exited": 10}


def test_processes_are_kept_and_started_only_as_needed():
    """One answer starts one process, the next call uses the same; without answers there is none."""
    with closing(make_pool(processes=4)) as pool:
        assert outcomes(pool) == []
        assert not pool._children
        assert outcomes(pool, "pid") == outcomes(pool, "pid")
        assert len(pool._children) == 1


def test_what_a_verifier_prints_is_no_reply():
    """Replies have a channel of their own."""
    with closing(make_pool()) as pool:
        assert outcomes(pool, "speak", "right") == [WRONG, RIGHT]


def test_a_process_that_died_while_idle_is_replaced():
    """Nobody's answer fails for it."""
    with closing(make_pool()) as pool:
        (before,) = outcomes(pool, "pid")
        pid = before.rewards[""]
        os.kill(int(pid), signal.SIGKILL)
        psutil.wait_procs([process for process in psutil.Process().children() if process.pid == pid], 10)
        assert outcomes(pool, "right") == [RIGHT]
        assert not pool.counts.failures


def test_a_verifier_that_does_not_start_ends_the_role(capfd):
    """A mistake in the installation is no wrong answer."""
    pool = VerifierPool("no_such_module:score", processes=1, timeout_s=1.0)
    with closing(pool), pytest.raises(RoleFailed, match="no_such_module:score does not start"):
        pool.submit([VerifierCall("1", "1")]).result()
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@pytest.mark.parametrize("answer", ["loop", "sleep"])
def test_no_process_is_left_when_the_parent_is_killed(answer, tmp_path, monkeypatch):
    """An idle one sees its stdin end; one that hangs reaches its limit of CPU time, or of the clock."""
    hanging = tmp_path / "hanging"
    os.mkfifo(hanging)
    monkeypatch.setenv("HANGING", str(hanging))
    code = f"""
        from mrl.tasks.verifier_pool import VerifierPool
        from mrl.tasks.verifier_process import VerifierCall
        pool = VerifierPool("tests.support.hard_verifiers:by_text", processes=2, timeout_s=0.3)
        pool.submit([VerifierCall("right", "pid")] * 40).result()
        print(*[child.process.pid for child in pool._children], flush=True)
        pool.submit([VerifierCall("right", {answer!r})]).result()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert children
        assert hanging.read_text() == "now"
        parent.kill()
    assert not psutil.wait_procs(children, timeout=120)[1]


def test_a_group_waits_for_its_own_answers_only():
    """One that hangs is overtaken by those handed in after it; closing cancels it and ends its process."""
    pool = make_pool(processes=2, timeout_s=1000.0)
    hanging = pool.submit([VerifierCall("right", "right"), VerifierCall("right", "sleep")])
    for answer, outcome in (("right", RIGHT), ("wrong", WRONG)):
        assert pool.submit([VerifierCall("right", answer)]).result(120) == [outcome]
    assert not hanging.done()
    processes = [child.process for child in pool._children]
    assert len(processes) == 2

    pool.close()
    assert hanging.cancelled()
    assert all(process.poll() is not None for process in processes)
    assert pool.submit([VerifierCall("right", "right")]).cancelled()


def test_no_process_idles_while_answers_wait():
    """Groups of one answer each are judged side by side, as many as there are processes."""
    with closing(make_pool(processes=3, timeout_s=1000.0)) as pool:
        for _ in range(4):
            pool.submit([VerifierCall("right", "sleep")])
        deadline_s = time.monotonic() + 120
        while sum(child.job is not None for child in pool._children) < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert len(pool._children) == 3


def test_the_lowest_rank_is_judged_first(tmp_path, monkeypatch):
    """Behind what a process has begun already; answers of one rank in the order of handing in."""
    hanging = tmp_path / "hanging"
    os.mkfifo(hanging)
    monkeypatch.setenv("HANGING", str(hanging))
    order: list[str] = []
    with closing(make_pool(timeout_s=0.5)) as pool:
        first = pool.submit([VerifierCall("right", "sleep")], rank=9)
        assert hanging.read_text() == "now"
        futures = {
            name: pool.submit([VerifierCall("right", "right")], rank=rank)
            for name, rank in [("b", 2), ("c", 2), ("a", 1)]
        }
        for name, future in futures.items():
            future.add_done_callback(lambda _, name=name: order.append(name))
        assert is_failure(*first.result(120), "timeout")
        assert [future.result(120) for future in futures.values()] == [[RIGHT]] * 3
    assert order == ["a", "b", "c"]


def test_after_a_failed_start_the_next_answer_tries_again(capfd):
    """What was handed in before fails; the pool itself goes on."""
    with closing(VerifierPool("no_such_module:score", processes=2, timeout_s=1.0)) as pool:
        first = [pool.submit([VerifierCall("1", "1")]) for _ in range(3)]
        for future in [*first, pool.submit([VerifierCall("1", "1")])]:
            with pytest.raises(RoleFailed, match="does not start"):
                future.result(120)


def test_an_answer_that_cannot_be_given_is_not_forgotten(monkeypatch):
    """It is neither in the queue nor with a process then; whoever awaits it hears of it, and the pool goes on."""
    encoded, errors = verifier_pool._encoded, iter([MemoryError("no room for the request")])

    def encode(call, extras):
        for error in errors:
            raise error
        return encoded(call, extras)

    monkeypatch.setattr(verifier_pool, "_encoded", encode)
    with closing(make_pool()) as pool:
        with pytest.raises(MemoryError, match="no room for the request"):
            pool.submit([VerifierCall("right", "right")]).result(120)
        assert pool.submit([VerifierCall("right", "right")]).result(120) == [RIGHT]
