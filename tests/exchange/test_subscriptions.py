"""Score requests find one living engine of the policy that they ask, whatever happens to the others."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.exchange.sessions import FORGET_AFTER_S
from mrl.exchange.subscriptions import CLAIM_S, LAPSE_S, MAX_GIVEN
from mrl.records.exchange_messages import Announce, Deliver, Done, Fetch, Hello, Ping, StatRequest, Subscribe, Welcome
from mrl.records.version import Version
from tests.support.stored_core import StoredCore, put_message, records_of

STUDENT, ENGINES = b"worker/qwen/0", [b"worker/llama/0", b"worker/llama/1", b"worker/llama/2"]


def make_core():
    """A core that knows a student and three engines of llama."""
    core = StoredCore(budget_bytes=10**8, max_age_versions=10)
    core.handle(STUDENT, Hello(client=STUDENT.decode(), policy="qwen"), 0.0)
    for engine in ENGINES:
        core.handle(engine, Hello(client=engine.decode(), policy="llama"), 0.0)
    return core


def delivered(out):
    """(client, record id) of everything delivered."""
    return [
        (to, record.record_id) for to, message in out if isinstance(message, Deliver) for record in records_of(message)
    ]


def put(core, *records, client=STUDENT, now_s=0.0):
    """Returns what was delivered."""
    return delivered(core.handle(client, put_message(*records), now_s))


def subscribe(core, engine, now_s=0.0, kinds=("score_request",)):
    """Returns what was delivered."""
    return delivered(core.handle(engine, Subscribe(client="e", kinds=list(kinds)), now_s))


def done(core, client, *record_ids, now_s=0.0):
    """Returns what was delivered."""
    return delivered(core.handle(client, Done(client="e", requests=list(record_ids)), now_s))


def stat(core):
    """The daemon's account."""
    [(_, message)] = core.handle(b"x", StatRequest(client="x"), 0.0)
    return message


def fetch(core, client, kind, watch=False, prompt_id="p1"):
    """Ids of the records that came at once."""
    message = Fetch(
        client="l", policy="-", prompt_ids=[prompt_id], kinds=[kind], limit=4, max_age_versions=None, watch=watch,
    )  # fmt: skip
    return [record_id for _, record_id in delivered(core.handle(client, message, 0.0))]


def test_requests_go_round(request_for):
    """Each to one engine, in turn."""
    core = make_core()
    for engine in ENGINES:
        subscribe(core, engine)
    requests = [request_for("llama", f"q{n}", prompt_id=f"p{n}") for n in range(6)]
    assert put(core, *requests) == [(ENGINES[n % 3], f"q{n}") for n in (0, 3, 1, 4, 2, 5)]
    assert core.tick(0.1) == []


def test_a_request_waits_for_its_first_engine(request_for):
    """It is held until somebody serves its policy, and the account says how many wait."""
    core = make_core()
    assert put(core, request_for("llama"), request_for("gemma", "q2")) == []
    assert stat(core).unserved == 2
    assert subscribe(core, ENGINES[0]) == [(ENGINES[0], "q1")]
    assert (stat(core).unserved, stat(core).unacknowledged) == (1, 1)


def test_only_engines_of_the_asked_policy_are_given_it(request_for):
    """Neither by subscription nor by asking does another policy see it."""
    core = make_core()
    core.handle(b"gemma", Hello(client="g", policy="gemma"), 0.0)
    assert subscribe(core, b"gemma") == []
    fetch(core, b"gemma", "score_request", watch=True)
    assert put(core, request_for("llama")) == []
    assert fetch(core, b"gemma", "score_request") == []
    assert fetch(core, ENGINES[0], "score_request") == ["q1"]


def test_done_by_the_asked_policy_ends_it(request_for):
    """It is let go of, uncounted as an eviction, and its place goes to the next; a stranger's Done does nothing."""
    core = make_core()
    subscribe(core, ENGINES[0])
    put(core, request_for("llama"))
    done(core, STUDENT, "q1")
    assert "q1" in core.index
    done(core, ENGINES[0], "q1")
    assert "q1" not in core.index
    assert next(one for one in stat(core).policies if one.policy == "qwen").evicted == {}
    assert delivered(core.tick(10 * CLAIM_S)) == []


def test_what_a_dead_engine_had_goes_to_another(request_for):
    """After a few seconds without acknowledgement; the dead one is given nothing more."""
    core = make_core()
    for engine in ENGINES[:2]:
        subscribe(core, engine)
    put(core, request_for("llama", "q0"), request_for("llama", "q1", prompt_id="p2"))
    done(core, ENGINES[1], "q1")
    subscribe(core, ENGINES[1], CLAIM_S - 0.1)
    assert delivered(core.tick(CLAIM_S - 0.05)) == []
    assert delivered(core.tick(CLAIM_S)) == [(ENGINES[1], "q0")]
    assert put(core, request_for("llama", "q2", prompt_id="p3"), now_s=CLAIM_S + 0.1) == [(ENGINES[1], "q2")]


def test_an_engine_that_let_something_lie_gets_nothing_until_it_renews(request_for):
    """Also when it renewed shortly before it died."""
    core = make_core()
    subscribe(core, ENGINES[0])
    put(core, request_for("llama"))
    subscribe(core, ENGINES[0], CLAIM_S - 0.1)
    assert delivered(core.tick(CLAIM_S)) == []
    assert subscribe(core, ENGINES[0], CLAIM_S + 0.9) == [(ENGINES[0], "q1")]


def test_a_restarted_engine_gives_back_what_its_predecessor_had(request_for):
    """At once, to another that serves."""
    core = make_core()
    for engine in ENGINES[:2]:
        subscribe(core, engine)
    put(core, request_for("llama"))
    core.handle(ENGINES[0], Hello(client="e", policy="llama"), 1.0)
    assert delivered(core.tick(1.0)) == [(ENGINES[1], "q1")]


def test_a_subscription_lapses(request_for):
    """Who does not renew is given nothing; an empty list ends it at once."""
    core = make_core()
    subscribe(core, ENGINES[0])
    assert put(core, request_for("llama"), now_s=LAPSE_S + 0.1) == []
    subscribe(core, ENGINES[0], 10.0)
    subscribe(core, ENGINES[0], 10.0, kinds=())
    assert put(core, request_for("llama", "q2", prompt_id="p2"), now_s=10.0) == []


def test_a_late_done_of_the_former_holder_counts(request_for):
    """It has taken the request over after all; the new holder's work is spared if it has not begun."""
    core = make_core()
    subscribe(core, ENGINES[0])
    put(core, request_for("llama"))
    subscribe(core, ENGINES[1], CLAIM_S)
    done(core, ENGINES[0], "q1", now_s=CLAIM_S)
    assert "q1" not in core.index
    assert stat(core).unacknowledged == 0


def test_an_engine_has_a_bounded_number_at_once(request_for):
    """The rest follows as it acknowledges."""
    core = make_core()
    requests = [request_for("llama", f"q{n}", prompt_id=f"p{n}") for n in range(MAX_GIVEN + 10)]
    put(core, *requests)
    first = subscribe(core, ENGINES[0])
    assert [record_id for _, record_id in first] == [f"q{n}" for n in range(MAX_GIVEN)]
    assert done(core, ENGINES[0], "q0", "q1") == [(ENGINES[0], f"q{MAX_GIVEN}"), (ENGINES[0], f"q{MAX_GIVEN + 1}")]


def test_a_request_that_grew_stale_is_asked_no_more(request_for):
    """What leaves the index leaves the queue."""
    core = make_core()
    put(core, request_for("llama", step=0))
    core.handle(STUDENT, Announce(client="w", policy="qwen", version=Version(0, 11)), 0.0)
    assert subscribe(core, ENGINES[0]) == []
    assert stat(core).unserved == 0


def test_a_score_removes_its_request_and_reaches_only_who_asked(request_for, score_of):
    """By watch and by asking; a score by somebody else removes nothing."""
    core = make_core()
    asked = request_for("llama")
    core.handle(b"gemma", Hello(client="g", policy="gemma"), 0.0)
    for client in (b"gemma", STUDENT):
        fetch(core, client, "score", watch=True)
    put(core, asked)
    assert put(core, score_of(asked, "s0", "gemma"), client=b"gemma") == [(STUDENT, "s0")]
    assert "q1" in core.index
    assert put(core, score_of(asked), client=ENGINES[0]) == [(STUDENT, "s1")]
    assert "q1" not in core.index
    assert subscribe(core, ENGINES[1]) == []
    assert sorted(fetch(core, STUDENT, "score")) == ["s0", "s1"]
    assert fetch(core, b"gemma", "score") == []


def test_a_score_cannot_remove_another_record(outcome, request_for, score_of):
    """Naming the id of a success as its request does nothing."""
    core = make_core()
    put(core, outcome("q1"))
    put(core, score_of(request_for("llama", "q1")), client=ENGINES[0])
    assert "q1" in core.index


def test_a_restarted_daemon_asks_what_is_still_open_and_nothing_else(request_for, score_of):
    """Without what was done or scored."""
    core = make_core()
    requests = [request_for("llama", f"q{n}", prompt_id=f"p{n}") for n in range(3)]
    put(core, *requests)
    subscribe(core, ENGINES[0])
    done(core, ENGINES[0], "q0")
    put(core, score_of(requests[1]), client=ENGINES[1])
    again = StoredCore(budget_bytes=10**8, max_age_versions=10)
    again.restore(core.contents())
    again.handle(ENGINES[2], Hello(client="e", policy="llama"), 0.0)
    assert subscribe(again, ENGINES[2]) == [(ENGINES[2], "q2")]


def test_a_stranger_is_asked_to_introduce_himself():
    """A subscription belongs to a policy, and that is known from Hello."""
    [(_, answer)] = make_core().handle(b"stranger", Subscribe(client="x", kinds=["score_request"]), 0.0)
    assert isinstance(answer, Welcome)
    assert not answer.known


def test_a_silent_engine_is_forgotten_with_what_it_had(request_for):
    """Its requests wait for the next that serves."""
    core = make_core()
    subscribe(core, ENGINES[0])
    put(core, request_for("llama"))
    core.handle(ENGINES[1], Ping(client="e"), FORGET_AFTER_S)
    core.tick(FORGET_AFTER_S + 1)
    assert subscribe(core, ENGINES[1], FORGET_AFTER_S + 1) == [(ENGINES[1], "q1")]


class Observer:
    """Watches every delivery of a core and says when one breaks a rule."""

    def __init__(self, core):
        self.core, self.now_s = core, 0.0
        self.open, self.holder, self.renewed, self.inbox = {}, {}, {}, {engine: set() for engine in ENGINES}
        self.num_asked = 0

    def see(self, deliveries):
        for engine, record_id in deliveries:
            assert record_id in self.open
            assert self.now_s - self.renewed[engine] <= LAPSE_S
            holder, given_s = self.holder.get(record_id, (None, 0.0))
            assert holder is None or self.now_s - given_s >= CLAIM_S, f"{record_id} is still with {holder}"
            self.holder[record_id] = engine, self.now_s
            self.inbox[engine].add(record_id)
            assert sum(1 for one, _ in self.holder.values() if one == engine) <= MAX_GIVEN

    def close(self, record_ids):
        for record_id in record_ids:
            self.open.pop(record_id, None)
            self.holder.pop(record_id, None)

    def act(self, action, engine, seconds, request_for, score_of):
        match action:
            case "ask":
                self.num_asked += 1
                asked = request_for("llama", f"q{self.num_asked}", prompt_id=f"p{self.num_asked}")
                self.open[asked.record_id] = asked
                self.see(put(self.core, asked, now_s=self.now_s))
            case "renew":
                self.renewed[engine] = self.now_s
                self.see(subscribe(self.core, engine, self.now_s))
            case "acknowledge":
                taken, self.inbox[engine] = self.inbox[engine], set()
                self.close(taken)
                self.see(done(self.core, engine, *taken, now_s=self.now_s))
            case "lose":
                self.inbox[engine] = set()
            case "restart":
                self.inbox[engine], self.renewed[engine] = set(), float("-inf")
                self.holder = {record_id: item for record_id, item in self.holder.items() if item[0] != engine}
                self.core.handle(engine, Hello(client="e", policy="llama"), self.now_s)
            case "score" if self.open:
                record_id, asked = next(iter(self.open.items()))
                self.close([record_id])
                score = score_of(asked, f"s-{record_id}")
                self.see(put(self.core, score, client=ENGINES[0], now_s=self.now_s))
            case "wait":
                self.now_s += seconds
                for one in ENGINES:
                    self.core.handle(one, Ping(client="e"), self.now_s)
                self.see(delivered(self.core.tick(self.now_s)))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "renew", "acknowledge", "lose", "restart", "score", "wait", "wait"]),
        st.sampled_from(ENGINES),
        st.sampled_from([0.25, 1.0, 2.75, 3.5]),
    ),
    max_size=80,
)


@settings(deadline=None)
@given(actions=ACTIONS)
def test_a_request_is_with_one_living_engine_at_a_time_and_none_is_forgotten(request_for, score_of, actions):
    """Engines die, restart, lose and acknowledge in any order; then one that lives gets all that is still open."""
    observer = Observer(make_core())
    for action, engine, seconds in actions:
        observer.act(action, engine, seconds, request_for, score_of)
    survivor = ENGINES[1]
    for action in ["wait", "renew", "acknowledge", "acknowledge"] * 8:
        observer.act(action, survivor, 1.0, request_for, score_of)
    assert observer.open == {}
    assert stat(observer.core).unserved == stat(observer.core).unacknowledged == 0
