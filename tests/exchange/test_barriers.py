"""Policies that go in step: nobody passes a barrier before all have come to it, and in the end all pass."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.exchange.barriers import Barriers
from mrl.records.exchange_messages import Announce, Barrier, BarrierState, Hello, Ping, StatRequest, Welcome
from mrl.records.version import Version
from tests.support.stored_core import StoredCore

POLICIES = ["gemma", "llama", "qwen"]


def make_core():
    """A core that knows a learner of every policy."""
    core = StoredCore()
    for policy in POLICIES:
        core.handle(policy.encode(), Hello(client=policy, policy=policy), 0.0)
    return core


def arrive(core, policy, number):
    """Returns {who is told: who is missing there}."""
    message = Barrier(client=policy, policy=policy, number=number, members=POLICIES)
    out = core.handle(policy.encode(), message, 0.0)
    assert all(isinstance(state, BarrierState) for _, state in out)
    return {client.decode(): (state.number, state.missing) for client, state in out}


def test_the_last_to_come_opens_for_all():
    """Those before are told who is missing, and that it is open as soon as it is."""
    core = make_core()
    assert arrive(core, "qwen", 4) == {"qwen": (4, ["gemma", "llama"])}
    assert arrive(core, "gemma", 4) == {"gemma": (4, ["llama"])}
    assert arrive(core, "llama", 4) == {policy: (4, []) for policy in POLICIES}


def test_saying_it_twice_changes_nothing():
    """A repeated message is answered again, before and after the opening."""
    core = make_core()
    for _ in range(2):
        assert arrive(core, "qwen", 0) == {"qwen": (0, ["gemma", "llama"])}
    arrive(core, "llama", 0)
    arrive(core, "gemma", 0)
    assert arrive(core, "qwen", 0) == {"qwen": (0, [])}


def test_who_has_gone_further_has_been_there():
    """The answer that was lost is not lost for good; a late repetition takes nothing back."""
    core = make_core()
    for policy in POLICIES:
        arrive(core, policy, 1)
    arrive(core, "gemma", 2)
    assert arrive(core, "qwen", 1) == {"qwen": (1, [])}
    assert arrive(core, "gemma", 1) == {"gemma": (1, [])}
    assert arrive(core, "qwen", 2) == {"qwen": (2, ["llama"])}
    assert arrive(core, "llama", 2) == {policy: (2, []) for policy in POLICIES}


def test_who_waits_is_told_how_far_the_missing_are():
    """What each of them said last; clients of the policy that do not say, and strangers, change nothing."""
    core = make_core()
    core.handle(b"worker", Hello(client="worker", policy="llama"), 0.0)
    for client, progress in ((b"llama", 3), (b"llama", 5), (b"worker", 0), (b"gemma", 2), (b"stranger", 9)):
        core.handle(client, Ping(client=client.decode(), progress=progress), 0.0)

    def told(number):
        message = Barrier(client="qwen", policy="qwen", number=number, members=POLICIES)
        [(_, state)] = core.handle(b"qwen", message, 0.0)
        return dict(zip(state.missing, state.progress, strict=True))

    assert told(0) == {"gemma": 2, "llama": 5}
    arrive(core, "gemma", 0)
    assert told(0) == {"llama": 5}


def test_a_resumed_policy_has_come_to_nothing_yet():
    """And the account shows how far each is."""
    core = make_core()
    for policy in POLICIES:
        arrive(core, policy, 7)
    core.handle(b"qwen", Announce(client="q", policy="qwen", version=Version(1, 2), resumed=True), 0.0)
    assert arrive(core, "llama", 4) == {"llama": (4, ["qwen"])}
    [(_, stat)] = core.handle(b"x", StatRequest(client="x"), 0.0)
    assert {policy_stat.policy: policy_stat.barrier for policy_stat in stat.policies} == {
        "gemma": 7,
        "llama": 7,
        "qwen": None,
    }
    assert arrive(core, "qwen", 4) == {"llama": (4, []), "qwen": (4, [])}


def test_a_repeated_announcement_of_the_resume_is_no_second_one():
    """Clients repeat it every second."""
    core = make_core()
    resume = Announce(client="q", policy="qwen", version=Version(1, 2), resumed=True)
    core.handle(b"qwen", resume, 0.0)
    arrive(core, "qwen", 4)
    core.handle(b"qwen", resume, 1.0)
    arrive(core, "gemma", 4)
    assert "qwen" in arrive(core, "llama", 4)


def test_a_stranger_is_asked_to_introduce_himself():
    """Only a client that said Hello speaks for a policy, and only for its own."""
    core = make_core()
    message = Barrier(client="x", policy="qwen", number=3, members=POLICIES)
    [(_, answer)] = core.handle(b"stranger", message, 0.0)
    assert isinstance(answer, Welcome)
    assert not answer.known
    core.handle(b"llama", message, 0.0)
    assert arrive(core, "gemma", 3)["gemma"] == (3, ["qwen"])


def test_a_client_that_left_is_not_told():
    """Nothing is sent to a connection that is forgotten."""
    core = make_core()
    arrive(core, "qwen", 0)
    core.handle(b"qwen", Hello(client="qwen", policy="qwen"), 1.0)
    arrive(core, "llama", 0)
    assert set(arrive(core, "gemma", 0)) == {"llama", "gemma"}


@settings(deadline=None)
@given(arrivals=st.lists(st.tuples(st.sampled_from(POLICIES), st.integers(0, 3)), max_size=40))
def test_everybody_is_told_of_an_opening_exactly_when_it_happens(arrivals):
    """Against a list of all arrivals: missing is who has not come that far; the others hear of it once."""
    barriers, came, waiting = Barriers(), [], {}

    def missing_at(number):
        return [p for p in POLICIES if not any(q == p and n >= number for q, n in came)]

    for policy, number in arrivals:
        came.append((policy, number))
        waiting[policy] = max(number, waiting.get(policy, number))
        expected = {(other, at, ()) for other, at in waiting.items() if not missing_at(at)}
        waiting = {other: at for other, at in waiting.items() if missing_at(at)}
        expected.add((policy, number, tuple(missing_at(number))))
        told = barriers.arrive(policy.encode(), policy, number, POLICIES)
        assert sorted((client.decode(), at, tuple(names)) for client, at, names in told) == sorted(expected)


STEPS = st.lists(st.tuples(st.sampled_from(POLICIES), st.booleans(), st.booleans()), max_size=120)


@settings(deadline=None)
@given(steps=STEPS)
def test_nobody_passes_early_and_all_pass_in_the_end_whatever_is_lost(steps):
    """Three policies repeat themselves until they may pass; any message of theirs or of the daemon may vanish."""
    core, last = make_core(), 4
    number = dict.fromkeys(POLICIES, 0)

    def say(policy, is_heard, is_answered):
        if not is_heard:
            return
        for client, (at, missing) in arrive(core, policy, number[policy]).items():
            if is_answered and not missing and at == number[client] < last:
                assert min(number.values()) >= at
                number[client] += 1

    for policy, is_heard, is_answered in steps:
        say(policy, is_heard, is_answered)
    for policy in POLICIES * 2 * (last + 1):
        say(policy, True, True)
    assert set(number.values()) == {last}
