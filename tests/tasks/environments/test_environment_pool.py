"""Environment processes against environments that really hang, die, eat memory and lie."""

import os
import re
import signal
import threading
import time
from concurrent.futures import wait
from contextlib import closing

import psutil
import pytest

from mrl.errors import RoleFailed
from mrl.records.episodes import ToolCall
from mrl.tasks.environments import environment_child
from mrl.tasks.environments.contract import EnvironmentTurn, MalformedCall, PolicyTurn
from mrl.tasks.environments.environment_pool import EnvironmentPool, EpisodeSession

LONG_S = 60.0
pytestmark = pytest.mark.usefixtures("verifiers")


def make_pool(name: str = "Echo", **settings) -> EnvironmentPool:
    """One process with time enough for every episode that ends by itself, however loaded the machine."""
    settings = {"processes": 1, "wall_s": 60.0, "cpu_s": 60.0, "memory_bytes": 1 << 30} | settings
    return EnvironmentPool(f"tests.support.hard_environments:{name}", **settings)


def processes_of(pool: EnvironmentPool) -> list[int]:
    """Ids of the processes that live now."""
    return [child.process.pid for child in list(pool._children)]


def opened(pool: EnvironmentPool, seed: int = 0, **row) -> EpisodeSession:
    """An episode that has begun."""
    session = pool.open(seed, row)
    assert session.first.result(LONG_S).messages[0].content == f"seed {seed}"
    return session


def said(session: EpisodeSession, text: str) -> EnvironmentTurn:
    """The answer to one turn."""
    return session.step(PolicyTurn(text)).result(LONG_S)


def text_of(turn: EnvironmentTurn) -> str:
    """What it says."""
    assert not turn.reason, turn
    return turn.messages[0].content


def test_an_episode_from_its_seed_to_its_reward():
    """First message, turns, end with a reward; after it nothing is asked any more."""
    with closing(make_pool()) as pool:
        session = opened(pool, 7)
        assert text_of(said(session, "a")) == "1: a"
        last = said(session, "end")
        assert (last.done, last.reward, last.reason) == (True, 2.0, "done")
        assert said(session, "more").reason == "given_up"
        assert pool.counts.ends == {"done": 1}


def test_an_episode_that_ends_from_outside_has_its_reward():
    """The last turn that a task gives is answered by `finish`, with the reason."""
    with closing(make_pool()) as pool:
        session = opened(pool)
        said(session, "a")
        last = session.finish("max_turns").result(LONG_S)
        assert (last.reward, last.reason) == (1.0, "max_turns")


@pytest.mark.parametrize(
    ("text", "reason", "told"),
    [("raise", "raised", r"KeyError: 'n' \(.*hard_environments.py:\d+ in _do"), ("leave", "exited", "SystemExit: 4"),
     ("long", "too_long", "10,000,000 bytes"), ("surrogate", "not_text", "not UTF-8"),
     ("bytes", "wrong_type", "wanted text"), ("number", "wrong_type", "step returned int"),
     ("nan", "not_finite", "nan"), ("infinite", "not_finite", "inf"), ("die", "exited", "exit code 3"),
     ("eat", "memory", "out of memory"), ("loop", "timeout", "CPU time")],
)  # fmt: skip
def test_a_bad_turn_costs_its_episode_alone(text, reason, told):
    """It ends with a reason and how it came; another episode of the process goes on, and new ones begin."""
    with closing(make_pool(**({"cpu_s": 0.5} if text == "loop" else {}))) as pool:
        good, bad = opened(pool, 1), opened(pool, 2)
        said(good, "a")
        turn = said(bad, text)
        assert (turn.done, turn.reason, turn.reward) == (True, reason, None)
        assert text_of(said(good, "b")) == "2: b"
        opened(pool, 3)
        assert pool.counts.ends == {reason: 1}
        assert (pool.counts.processes > 1) == (text in ("die", "eat"))
        assert re.search(told, turn.words)


def test_a_bad_beginning_is_the_episodes_end():
    """What `reset` does wrong is told by the first turn."""
    with closing(make_pool()) as pool:
        assert pool.open(0, {"reset": "raise"}).first.result(LONG_S).reason == "raised"
        assert pool.open(0, {"reset": "long"}).first.result(LONG_S).reason == "too_long"
        assert pool.open(0, {"reset": "die"}).first.result(LONG_S).reason == "exited"


def test_one_that_waits_delays_nobody_and_is_ended():
    """Others are served meanwhile; it ends by the clock, and its thread does not come back to disturb."""
    with closing(make_pool(wall_s=3.0)) as pool:
        slow, quick = opened(pool, 1), opened(pool, 2)
        waiting = slow.step(PolicyTurn("sleep"))
        assert [text_of(said(quick, "x")) for _ in range(50)][-1] == "50: x"
        assert not waiting.done()
        assert waiting.result(LONG_S).reason == "timeout"
        assert text_of(said(quick, "y")) == "51: y"
        assert pool.counts.processes == 1


@pytest.mark.thorough
def test_code_that_holds_the_interpreter_ends_alone(monkeypatch):
    """Its process is silent and killed; the innocent is played again, the culprit alone, and ends by the clock."""
    monkeypatch.setattr(environment_child, "SILENCE_S", 2.0)
    with closing(make_pool(wall_s=6.0)) as pool:
        bad, good = opened(pool, 1), opened(pool, 2)
        said(good, "a")
        hanging, going_on = bad.step(PolicyTurn("regex")), good.step(PolicyTurn("b"))
        assert text_of(going_on.result(LONG_S)) == "2: b"
        assert hanging.result(LONG_S).reason == "timeout"
        assert pool.counts.replays >= 2


def test_a_process_that_is_killed_costs_nobody_anything():
    """Episodes are played again, and say the same; those that never do are lost."""
    with closing(make_pool()) as pool:
        sessions = [opened(pool, seed) for seed in range(20)]
        for session in sessions:
            said(session, "a")
        os.kill(processes_of(pool)[0], signal.SIGKILL)
        assert [text_of(said(session, "b")) for session in sessions] == ["2: b"] * 20
        assert pool.counts.ends == {}
    with closing(make_pool("Changing")) as pool:
        session = pool.open(0, {})
        session.first.result(LONG_S)
        os.kill(processes_of(pool)[0], signal.SIGKILL)
        assert said(session, "a").reason == "lost"


def test_a_thousand_episodes_at_once_over_two_processes():
    """Each says its own, whatever the order."""
    with closing(make_pool(processes=2)) as pool:
        sessions = [pool.open(seed, {}) for seed in range(1000)]
        assert [text_of(one.first.result(LONG_S)) for one in sessions] == [f"seed {n}" for n in range(1000)]
        begun_s = time.monotonic()
        futures = [session.step(PolicyTurn("pause")) for session in sessions]
        assert not wait(futures, LONG_S).not_done
        assert {text_of(future.result()) for future in futures} == {"1: pause"}
        assert time.monotonic() - begun_s < 100.0  # 200 s one behind the other, 100 s in either process
        assert len(processes_of(pool)) == 2


def test_an_episode_stays_in_its_thread():
    """What a class keeps per thread is there in the next turn."""
    with closing(make_pool("Locking")) as pool:
        session = opened(pool)
        assert text_of(said(session, "x")) == "42"


def test_what_is_closed_is_given_up_and_breaks_off(tmp_path):
    """A session that nobody awaits any more, and a whole pool with its processes."""
    sign = tmp_path / "sign"
    os.mkfifo(sign)
    pool = make_pool()
    session = opened(pool, 0, sign=str(sign))
    hanging = session.step(PolicyTurn("loop"))
    sign.read_text()
    session.close()
    assert hanging.result(LONG_S).reason == "given_up"
    until_s = time.monotonic() + LONG_S
    while (threads := psutil.Process(processes_of(pool)[0]).num_threads()) > 1 and time.monotonic() < until_s:
        time.sleep(0.05)
    assert threads == 1
    other = opened(pool, 2)
    waiting = other.step(PolicyTurn("sleep"))
    children = [psutil.Process(pid) for pid in processes_of(pool)]
    pool.close()
    assert waiting.result(LONG_S).reason == "given_up"
    assert pool.open(0, {}).first.result(LONG_S).reason == "given_up"
    assert not psutil.wait_procs(children, timeout=LONG_S)[1]


@pytest.mark.parametrize("name", ["Closing", "Stubborn"])
@pytest.mark.parametrize("by", ["session", "processor time"])
def test_an_environment_is_closed_where_its_episode_is_broken_off(tmp_path, name, by):
    """By whoever gave it up, or because it ran for too long; what it keeps open belongs to others too."""
    sign, closed = tmp_path / "sign", tmp_path / "closed"
    os.mkfifo(sign)
    with closing(make_pool(name, cpu_s=0.5 if by == "processor time" else 60.0)) as pool:
        session = opened(pool, 0, sign=str(sign), closed=str(closed))
        running = session.step(PolicyTurn("loop"))
        sign.read_text()
        if by == "session":
            session.close()
        assert running.result(LONG_S).reason == ("given_up" if by == "session" else "timeout")
        until_s = time.monotonic() + LONG_S
        while not closed.exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        assert closed.exists(), "its environment was not closed"


def hang_in_close(pool: EnvironmentPool) -> None:
    """Four episodes do, behind a turn that ended or was broken off."""
    for number in range(4):
        session = opened(pool, number, hangs=True)
        if number % 2:
            session.step(PolicyTurn("loop"))
        session.close()


def test_a_process_that_only_hangs_is_ended(monkeypatch):
    """Its episodes are over before it is known that their threads are not."""
    monkeypatch.setattr(environment_child, "MAX_HANGING", 4)
    with closing(make_pool("Closing")) as pool:
        hang_in_close(pool)
        children = [psutil.Process(pid) for pid in processes_of(pool)]
        assert not psutil.wait_procs(children, timeout=LONG_S)[1]
        opened(pool)


def test_threads_that_hang_are_bounded_by_a_new_process(monkeypatch):
    """What else the process holds is played to its end there."""
    monkeypatch.setattr(environment_child, "MAX_HANGING", 4)
    with closing(make_pool("Closing")) as pool:
        good = opened(pool)
        [first] = processes_of(pool)
        hang_in_close(pool)
        until_s, later = time.monotonic() + LONG_S, str(first)
        while later == str(first) and time.monotonic() < until_s:
            session = opened(pool)
            later = text_of(said(session, "pid"))
            session.close()
        assert later != str(first)
        assert text_of(said(good, "pid")) == str(first)
        good.close()
        gone = psutil.Process(first)
        assert not psutil.wait_procs([gone], timeout=LONG_S)[1]
        assert len(processes_of(pool)) == 1


def test_a_cut_turn_may_be_rewarded():
    """As TRL's rewards see an answer that was cut; without one the last that was answered counts."""
    with closing(make_pool("Answered")) as pool:
        call = ToolCall.of("say", {"text": "a"})
        for cut, reward in ((PolicyTurn("cut in the mid", is_cut=True), 14.0), (None, 5.0)):
            session = opened(pool)
            session.step(PolicyTurn("first", (call,))).result(LONG_S)
            assert session.finish("cut", cut).result(LONG_S).reward == reward


def test_a_class_that_does_not_start_is_told_to_whoever_waits():
    """Every future raises, also those that come later."""
    with closing(make_pool("NoSuch")) as pool:
        first = [pool.open(seed, {}).first for seed in range(3)]
        for future in first:
            with pytest.raises(RoleFailed, match=r"hard_environments:NoSuch does not start \(exit code 2\)"):
                future.result(LONG_S)
        with pytest.raises(RoleFailed):
            pool.open(9, {}).first.result(LONG_S)


def test_threads_may_share_a_pool():
    """Sessions of several threads do not disturb each other."""
    with closing(make_pool()) as pool:
        found = {}

        def play(seed):
            session = opened(pool, seed)
            found[seed] = [text_of(said(session, "x")) for _ in range(20)]

        threads = [threading.Thread(target=play, args=(seed,)) for seed in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(LONG_S)
        assert all(found[seed][-1] == "20: x" for seed in range(8))


def test_tools_over_processes():
    """Schemas arrive with the first turn; answers, errors and broken calls come back as messages of tools."""
    with closing(make_pool("Shop")) as pool:
        session = pool.open(0, {"prompt": "Hello.", "item": "milk"})
        first = session.first.result(LONG_S)
        assert first.messages[0].content == "Hello. Buy milk."
        assert [tool.name for tool in first.tools] == ["buy", "price"]
        calls = (ToolCall.of("price", {"name": "milk"}), ToolCall.of("price", {"name": "gold"}), ToolCall("fly"))
        turn = session.step(PolicyTurn("...", calls, (MalformedCall("the call is cut"),))).result(LONG_S)
        assert [message.content for message in turn.messages] == [
            "2.5", "error: LookupError: no gold here", "error: there is no tool 'fly'; there are buy, price",
            "error: the call is cut",
        ]  # fmt: skip
        assert turn.tool_errors == 3
        last = session.step(PolicyTurn("2.5")).result(LONG_S)
        assert (last.reward, last.reason) == (1.0, "done")


def test_a_class_may_end_its_episode_and_memory_is_no_answer_of_a_tool():
    """After `done` the reward comes with the tool's answer; a tool out of memory fails the episode."""
    with closing(make_pool("Shop")) as pool:
        first, second = pool.open(0, {}), pool.open(1, {})
        assert not first.first.result(LONG_S).done
        assert not second.first.result(LONG_S).done
        last = first.step(PolicyTurn("", (ToolCall("buy"),))).result(LONG_S)
        assert (last.done, last.reward, last.reason, len(last.messages)) == (True, 1.0, "done", 1)
        call = ToolCall.of("price", {"name": "everything"})
        assert second.step(PolicyTurn("", (call,))).result(LONG_S).reason == "memory"
