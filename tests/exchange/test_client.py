"""The client against a real core over a link that the test can cut."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgpack
import msgspec
import pytest
from structlog.testing import capture_logs

from mrl.exchange.client import ExchangeClient
from mrl.exchange.inbox import Inbox
from mrl.exchange.limits import ClientLimits, Limits
from mrl.exchange.publisher import HEAD_BYTES
from mrl.records.codec import MAX_MESSAGE_BYTES, decode, encode
from mrl.records.exchange_messages import BarrierState, Deliver, Welcome, client_message_decoder
from mrl.records.version import Version
from mrl.transport.requests import SILENCE_S
from tests.support.stored_core import StoredCore, put_of_bodies

LIMITS = ClientLimits()


class Network:
    """Daemon and links in one thread: `run` carries messages until none is left; `lose` drops those under way."""

    def __init__(self):
        self.now_s = 0.0
        self.clients = {}
        self.under_way = []
        self.carried = []
        self.reconnects = 0
        self.is_up = True
        self.num_lost = 0
        self.answers_to_lose = set()
        self.restart("one")

    def restart(self, incarnation, *, failure=lambda: ""):
        """A fresh daemon that knows nobody."""
        self.core = make_core(failure=failure)
        self.core.incarnation = incarnation

    def connect(self, name, policy, **limits):
        """A client of this network."""
        network = self

        class Link:
            def post(self, body):
                network.under_way.append((name, body))
                return True

            def restart(self):
                network.reconnects += 1

            def close(self, timeout_s):
                del network.clients[name]

        client = ExchangeClient.connect(
            lambda on_message, on_tick: Link(),
            client=name,
            policy=policy,
            clock=lambda: self.now_s,
            limits=ClientLimits(**limits),
        )
        self.clients[name] = client
        return client

    def run(self):
        """Deliver everything, in both directions."""
        while self.under_way:
            self.run_one()

    def run_one(self):
        """Deliver one message and what the daemon says to it."""
        name, body = self.under_way.pop(0)
        self.carried.append(kind_of(body))
        if self.num_lost:
            self.num_lost -= 1
        elif self.is_up:
            for receiver, message in self.core.receive_body(name.encode(), body, self.now_s):
                if not self.is_lost(message):
                    self.clients[receiver.decode()].on_message(encode(message))

    def is_lost(self, message):
        """Whether this answer vanishes: `answers_to_lose` counts them from now, pongs aside."""
        if isinstance(message, Welcome) or not self.answers_to_lose:
            return False
        is_lost = 0 in self.answers_to_lose
        self.answers_to_lose = {number - 1 for number in self.answers_to_lose if number}
        return is_lost

    def lose(self):
        """What is under way never arrives. Returns the kinds of messages."""
        kinds = [kind_of(body) for _, body in self.under_way]
        self.under_way.clear()
        return kinds

    def run_during(self, *calls, step_s=0.0):
        """Make calls that wait, each on a thread of its own, and carry messages until all have returned."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            while not all(future.done() for future in futures):
                self.pass_time(step_s, step_s) if step_s else self.run()
            return [future.result() for future in futures]

    def train(self, seconds):
        """Let time go by at the daemon too."""
        for _ in range(seconds):
            self.pass_time(1, 1)
            for receiver, message in self.core.tick(self.now_s):
                self.clients[receiver.decode()].on_message(encode(message))
            self.run()

    def pass_time(self, seconds, step_s=0.5):
        """Let time go by with ticks."""
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            for client in self.clients.values():
                client.on_tick(self.now_s)
            self.run()


def make_core(**options):
    """A core that holds whatever fits."""
    return StoredCore(**({"budget_bytes": 10_000_000} | options))


@pytest.fixture
def network():
    """A daemon that is up."""
    return Network()


@pytest.fixture
def pair(network):
    """qwen's worker and llama's learner, both greeted."""
    worker, learner = network.connect("worker/qwen/0", "qwen"), network.connect("learner/llama", "llama")
    network.run()
    return worker, learner


def kind_of(body):
    """The name of a client message."""
    return type(decode(body, client_message_decoder)).__name__


def ids(received):
    """Record ids in order."""
    return [item.record.record_id for item in received]


def test_a_published_success_reaches_a_watching_peer(network, pair, outcome):
    """Announced, asked, published, taken: with its age, and once."""
    worker, learner = pair
    worker.announce(Version(0, 5))
    learner.fetch(["p1"], kinds=["outcome"], limit=2, max_age_versions=10)
    worker.publish([outcome(step=3)])
    network.run()
    assert [(item.record, item.age_versions) for item in learner.take()] == [(outcome(step=3), 2)]
    assert learner.take() == []
    assert worker.counts["stored"] == learner.counts["received"] == 1


def test_a_lost_put_is_sent_again(network, pair, outcome):
    """Until it is acknowledged; the daemon recognises what it has already."""
    worker, learner = pair
    worker.publish([outcome()])
    assert network.lose() == ["Put"]
    network.pass_time(SILENCE_S + 1)
    learner.fetch(["p1"], kinds=["outcome"], limit=1, max_age_versions=None)
    network.run()
    assert ids(learner.take()) == ["r1"]
    network.pass_time(60)
    assert worker.counts["stored"] == 1
    assert "refused/duplicate" not in worker.counts


def test_a_lost_fetch_is_sent_again_and_counts_once(network, pair, outcome):
    """The daemon's answer, though empty, ends the repetition."""
    worker, learner = pair
    learner.fetch(["p1"], kinds=["outcome"], limit=1, max_age_versions=None)
    assert network.lose() == ["Fetch"]
    network.pass_time(SILENCE_S + 1)
    worker.publish([outcome()])
    network.run()
    assert ids(learner.take()) == ["r1"]
    assert network.core.stat(network.now_s).flows[0].asked == 1
    network.pass_time(60)
    assert network.carried.count("Fetch") == 1


def test_a_lost_announcement_is_repeated(network, pair, outcome):
    """Also that of a resume."""
    worker, _ = pair
    worker.announce(Version(1, 4), resumed=True)
    worker.announce(Version(1, 5))
    network.lose()
    network.pass_time(2)
    worker.publish([outcome("void", step=5), outcome("good", step=4)])
    network.run()
    assert (worker.counts["stored"], worker.counts["refused/void"]) == (1, 1)
    assert network.core.versions.newest["qwen"] == Version(1, 5)


def test_a_lost_delivery_comes_again_and_is_taken_once(network, pair, outcome):
    """The acknowledgement, not the send, ends a delivery."""
    worker, learner = pair
    worker.publish([outcome()])
    network.run()
    del network.clients["learner/llama"]
    learner.fetch(["p1"], kinds=["outcome"], limit=1, max_age_versions=None)
    with pytest.raises(KeyError):
        network.run()
    network.clients["learner/llama"] = learner
    for _ in range(3):
        network.now_s += 4
        for receiver, message in network.core.tick(network.now_s):
            network.clients[receiver.decode()].on_message(encode(message))
        network.run()
    assert ids(learner.take()) == ["r1"]
    assert network.core.stat(network.now_s).unacknowledged == 0


def test_asking_again_may_bring_the_same_record_again(network, pair, outcome):
    """A success helps every time an own group fails on its prompt; within one asking it comes once."""
    worker, learner = pair
    worker.publish([outcome()])
    for _ in range(2):
        learner.fetch(["p1"], kinds=["outcome"], limit=1, max_age_versions=None)
        network.run()
        assert ids(learner.take()) == ["r1"]


def test_a_restarted_daemon_is_told_everything(network, pair, outcome):
    """Hello, versions, unacknowledged records and watches, as soon as its first message comes."""
    worker, learner = pair
    worker.announce(Version(0, 7))
    learner.fetch(["p1", "p2"], kinds=["outcome"], limit=2, max_age_versions=None)
    learner.unwatch(["p2"])
    network.run()
    worker.publish([outcome("unacknowledged", step=7)])
    network.lose()
    network.restart("two")
    network.pass_time(2)
    worker.publish([outcome("new", step=7), outcome("unwanted", prompt_id="p2")])
    network.run()
    assert sorted(ids(learner.take())) == ["new", "unacknowledged"]
    assert network.core.versions.newest["qwen"] == Version(0, 7)
    assert network.core.stat(network.now_s).clients == ["learner/llama", "worker/qwen/0"]
    assert learner.counts["hellos"] == 1


def test_a_watch_is_renewed_once_after_a_restart(network, pair):
    """An unanswered Fetch and its renewal are one asking."""
    _, learner = pair
    learner.fetch(["p1"], kinds=["outcome"], limit=1, max_age_versions=None)
    network.lose()
    network.restart("two")
    network.pass_time(60)
    assert network.carried.count("Fetch") == 1


def test_a_changed_incarnation_in_any_message_is_enough(network, pair, outcome):
    """The acknowledgement of a fresh daemon makes the client say Hello without waiting for the next ping."""
    worker, _ = pair
    network.restart("two")
    worker.publish([outcome()])
    network.run()
    assert network.core.stat(network.now_s).clients == ["worker/qwen/0"]
    assert worker.counts["stored"] == 1


def test_a_forgotten_client_says_hello_again(network, pair, outcome):
    """Suspended for long, it finds its watches renewed after the first ping."""
    worker, learner = pair
    learner.fetch(["p1"], kinds=["outcome"], limit=1, max_age_versions=None)
    network.run()
    network.now_s += 100
    network.core.tick(network.now_s)
    network.pass_time(5)
    worker.publish([outcome()])
    network.run()
    assert ids(learner.take()) == ["r1"]


def test_what_the_daemon_gave_up_while_the_link_was_cut_comes_with_the_next_one(network, pair, outcome):
    """A delivery is tried for 15 s, a session lasts 60 s: in between the daemon knows the watch and sends no more."""
    worker, learner = pair
    learner.fetch(["p1"], kinds=["outcome"], limit=4, max_age_versions=None)
    network.run()
    worker.publish([outcome()])
    network.answers_to_lose = {1}  # the acknowledgement of the Put is 0
    network.run()
    network.is_up = False
    for _ in range(20):
        network.core.tick(network.now_s)  # what it sends again does not arrive either
        network.pass_time(1)
    assert network.core.stat(network.now_s).abandoned == 1
    network.is_up = True
    network.pass_time(SILENCE_S + 1)
    worker.publish([outcome("r2")])
    network.run()
    assert sorted(ids(learner.take())) == ["r1", "r2"]


def test_silence_is_measured_and_makes_the_link_look_for_the_daemon(network, pair):
    """`lost_s` is zero while answers come and grows from the last one; reconnects are asked for with pauses."""
    _, learner = pair
    network.pass_time(20)
    assert (learner.lost_s(), network.reconnects) == (0.0, 0)
    network.is_up = False
    network.pass_time(10 * SILENCE_S)
    assert learner.lost_s(network.now_s) == pytest.approx(10 * SILENCE_S, abs=1.5)
    assert 2 * 7 <= network.reconnects <= 2 * 10
    network.is_up = True
    network.pass_time(SILENCE_S + 1)
    assert learner.lost_s() == 0.0


def test_without_a_daemon_memory_is_bounded_and_nothing_blocks(network, pair, outcome):
    """The oldest unacknowledged records are dropped and counted; the newest survive the absence."""
    worker, _ = pair
    network.is_up = False
    for number in range(300):
        worker.publish([outcome(f"r{number}", prompt_id=f"p{number}", completion=bytes(100_000))])
        network.lose()
    kept = 300 - worker.counts["dropped"]
    most = LIMITS.unacknowledged_bytes
    assert most - 2 * LIMITS.put_bytes < kept * 100_300 < most + 2 * LIMITS.put_bytes
    network.is_up = True
    network.core = make_core(budget_bytes=10**8)
    network.core.incarnation = "two"
    network.pass_time(4 * SILENCE_S)
    assert worker.counts["stored"] == kept
    assert "r299" in network.core.index


def test_a_refusal_is_counted_by_its_reason_and_not_repeated(network, pair, outcome):
    """A foreign record costs the record, not the link."""
    worker, _ = pair
    worker.publish([outcome(source="llama")])
    network.run()
    network.pass_time(60)
    assert worker.counts["refused/foreign"] == 1
    assert "stored" not in network.lose()


def test_what_a_full_disk_does_not_take_is_put_again(network, pair, outcome):
    """Nothing is acknowledged meanwhile, nothing is lost, and the client knows why."""
    worker, _ = pair
    failures = ["disk_full"]
    network.restart("two", failure=lambda: failures[0])
    worker.publish([outcome()])
    network.pass_time(60)
    assert worker.counts.get("stored", 0) == 0
    assert worker.storage == "disk_full"
    failures[0] = ""
    network.pass_time(60)
    assert (worker.counts["stored"], worker.storage) == (1, "")


def test_an_invalid_record_does_not_take_its_neighbours_with_it(network, pair, outcome):
    """The daemon reads tags alone; a reader counts what is beyond the limits."""
    worker, learner = pair
    learner.fetch(["p1"], kinds=["outcome"], limit=4, max_age_versions=None)
    worker.publish([outcome("bad", completion=bytes(300_000)), outcome("good")])
    network.pass_time(1.0)
    assert ids(learner.take()) == ["good"]
    assert (worker.counts["stored"], learner.counts["unreadable"]) == (2, 1)


def test_many_records_are_split_into_messages_of_bounded_size(network, pair, outcome):
    """Nothing much exceeds what a Put is made of, and no more goes at once than the window has room for."""
    worker, _ = pair
    network.restart("two")
    network.pass_time(1.0)
    worker.publish([outcome(f"r{number}", completion=bytes(200_000)) for number in range(30)])
    lengths = [len(body) for _, body in network.under_way]
    assert max(lengths) < LIMITS.put_bytes + 201_000
    window_bytes = network.core.limits.window_of(2)
    assert window_bytes - 2 * max(lengths) < sum(lengths) <= window_bytes
    network.run()
    assert worker.counts["stored"] == 30


def test_a_record_that_no_message_can_hold_is_left_out(network, pair, rollout):
    """It would be sent for ever; the limit leaves room for the message around it. A person is told of the first."""
    worker, _ = pair
    largest = exactly(MAX_MESSAGE_BYTES - HEAD_BYTES, rollout("largest", group=40, tokens=3_000))
    too_large = exactly(MAX_MESSAGE_BYTES - HEAD_BYTES + 1, rollout("large", group=40, tokens=3_000))
    with capture_logs() as logs:
        worker.publish([too_large, largest, rollout("good"), too_large])
    told = [(line["bytes"] - line["most"], line["cure"]) for line in logs]
    assert told == [(1, "lower rollout.group_size or rollout.max_new_tokens")]
    assert max(len(body) for _, body in network.under_way) <= MAX_MESSAGE_BYTES
    network.run()
    assert worker.losses() == {"exchange/too_large": 2.0, "exchange/dropped": 0.0}
    assert worker.counts["stored"] == 2


def exactly(num_bytes, record):
    """The record, its completions made longer until it has this size."""
    answers = [msgspec.structs.replace(answer, completion=bytes(70_000)) for answer in record.answers]
    for number, answer in enumerate(answers):
        lacking = num_bytes - len(encode(msgspec.structs.replace(record, answers=answers)))
        more = bytes(70_000 + min(lacking, 150_000))
        answers[number] = msgspec.structs.replace(answer, completion=more)
    return msgspec.structs.replace(record, answers=answers)


WAIT_S = 120.0
SHORT_S = 0.05


def test_flush_returns_when_everything_is_acknowledged_or_refused(network, pair, outcome):
    """Also when a message was lost on the way and had to be sent again."""
    worker, _ = pair
    assert worker.flush(0.0)
    worker.publish([outcome("r1"), outcome("r1"), outcome("foreign", source="llama")])
    network.num_lost = 1
    assert network.run_during(lambda: worker.flush(WAIT_S), step_s=0.5) == [True]
    assert (worker.counts["stored"], worker.counts["refused/duplicate"], worker.counts["refused/foreign"]) == (1, 1, 1)


def test_flush_does_not_wait_for_what_comes_later(network, pair, outcome, monkeypatch):
    """Another thread may go on publishing."""
    worker, _ = pair
    worker.publish([outcome("r1")])

    def wait_for(is_over, timeout_s):
        monkeypatch.undo()
        worker.publish([outcome("r2")])
        network.run_one()
        return is_over()

    monkeypatch.setattr(worker._changed, "wait_for", wait_for)
    assert worker.flush(WAIT_S)
    assert (worker.counts["stored"], len(network.under_way)) == (1, 1)


def test_flush_without_a_daemon_ends_in_time(network, pair, outcome):
    """It says that nothing was acknowledged."""
    worker, _ = pair
    network.is_up = False
    worker.publish([outcome()])
    assert network.run_during(lambda: worker.flush(SHORT_S)) == [False]


def test_a_publisher_that_waits_for_room_drops_nothing(network, rollout, monkeypatch):
    """More than may be unacknowledged at once goes through; without waiting some is dropped, and flush says so."""
    worker = network.connect("worker/qwen/0", "qwen", unacknowledged_bytes=6_000_000)
    network.run()
    records = [rollout(f"g{n}", prompt_id=f"p{n}", group=60, tokens=1000) for n in range(8)]
    assert 750_000 < len(encode(records[0])) < 1_000_000

    def wait_for(is_over, timeout_s):
        while not is_over():
            network.run_one()
        return True

    with monkeypatch.context() as patch:
        patch.setattr(worker._changed, "wait_for", wait_for)
        worker.publish(records, room_within_s=WAIT_S)
        assert worker.flush(WAIT_S)
    assert (worker.counts["stored"], worker.counts.get("dropped", 0)) == (8, 0)
    worker.publish([msgspec.structs.replace(record, record_id=record.record_id + "again") for record in records])
    network.run()
    assert worker.losses()["exchange/dropped"] == 8 - 6_000_000 // len(encode(records[0]))
    assert worker.flush(0.0) is False


def fetch_now(client, prompt_ids, timeout_s=WAIT_S, kinds=("rollout",)):
    """Ask for groups and wait."""
    return client.fetch_now(prompt_ids, kinds=kinds, limit=4, max_age_versions=None, timeout_s=timeout_s)


def test_fetch_now_returns_with_everything_that_is_there(network, pair, rollout):
    """In questions of bounded size; a prompt without a record is answered too."""
    worker, learner = pair
    network.restart("two")
    network.core.index._limits = Limits(budget_bytes=10**9)
    network.pass_time(1)
    worker.publish([rollout(f"g{n:02}", prompt_id=f"p{n:02}", group=4, tokens=2000) for n in range(50)])
    network.pass_time(2)
    prompt_ids = [f"p{n:02}" for n in range(60)]
    assert network.run_during(lambda: fetch_now(learner, prompt_ids)) == [True]
    assert ids(learner.take()) == [f"g{n:02}" for n in range(50)]
    assert network.carried.count("Fetch") == 2


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_fetch_now_survives_a_lost_question_or_answer(network, pair, rollout, lost):
    """Whichever message of the daemon is lost, it comes back with all records, each once."""
    worker, learner = pair
    network.restart("two")
    network.core.index._limits = Limits(budget_bytes=10**9)
    network.pass_time(1)
    worker.publish([rollout(f"g{n}", prompt_id=f"p{n}", group=20, tokens=1000) for n in range(12)])
    network.pass_time(2)
    network.answers_to_lose = {lost}
    prompt_ids = [f"p{n}" for n in range(12)]
    assert network.run_during(lambda: fetch_now(learner, prompt_ids), step_s=0.5) == [True]
    assert network.answers_to_lose == set()
    assert sorted(ids(learner.take())) == sorted(f"g{n}" for n in range(12))


def test_fetch_now_without_a_daemon_ends_in_time(network, pair, rollout):
    """What the caller gave up is not sent again."""
    _, learner = pair
    network.is_up = False
    assert network.run_during(lambda: fetch_now(learner, ["p1"], SHORT_S)) == [False]
    network.is_up, network.carried = True, []
    network.pass_time(60)
    assert "Fetch" not in network.carried


def test_fetch_now_is_not_given_up_for_other_questions(network, pair, rollout, monkeypatch):
    """Too many unanswered questions cost the oldest that nobody stands still for."""
    worker, learner = pair
    worker.publish([rollout()])
    network.run()

    def wait_for(is_over, timeout_s):
        for number in range(LIMITS.fetches + 5):
            learner.fetch([f"x{number}"], kinds=["value"], limit=1, max_age_versions=None)
        network.lose()
        assert not is_over()
        network.pass_time(2 * SILENCE_S)
        return is_over()

    monkeypatch.setattr(learner._changed, "wait_for", wait_for)
    assert fetch_now(learner, ["p1"])
    assert learner.counts["dropped_fetches"] == 6
    assert ids(learner.take()) == ["g1"]


@pytest.mark.parametrize("bound", [{"inbox_records": 2}, {"inbox_bytes": 700}])
def test_who_waits_for_an_answer_gets_all_of_it(network, rollout, bound):
    """Groups of long answers are larger together than what may come while nobody takes it, which stays bounded."""
    worker = network.connect("worker/qwen/0", "qwen")
    learner = network.connect("learner/llama", "llama", awaited_prompts=2, **bound)
    worker.publish([rollout(f"g{n}", prompt_id=f"p{n}") for n in range(4)])
    network.run()
    assert network.run_during(lambda: fetch_now(learner, ["p0", "p1", "p2", "p3"])) == [True]
    assert learner._inbox.is_full
    assert ids(learner.take()) == ["g0", "g1", "g2", "g3"]


def test_nothing_is_lost_of_what_comes_while_a_full_inbox_is_not_emptied(network, rollout):
    """However long a learner trains: what has no room waits at the daemon, untried, and holds up nobody else."""
    worker = network.connect("worker/qwen/0", "qwen")
    learner = network.connect("learner/llama", "llama", inbox_records=2)
    prompts = [f"p{number}" for number in range(6)]
    learner.fetch(prompts, kinds=["rollout"], limit=1, max_age_versions=None)
    network.run()
    worker.publish([rollout(f"g{number}", prompt_id=prompt) for number, prompt in enumerate(prompts[:3])])
    for published in ([], [3], [4, 5]):
        worker.publish([rollout(f"g{number}", prompt_id=prompts[number]) for number in published])
        network.train(60)
    stat = network.core.stat(network.now_s)
    assert (stat.abandoned, stat.unacknowledged) == (0, 0)
    taken = []
    for _ in range(6):
        taken += ids(learner.take())
        network.train(2)
    assert sorted(taken) == [f"g{number}" for number in range(6)]


def test_barrier_opens_when_the_last_has_come(network, pair):
    """Both return at once, whoever was first."""
    worker, learner = pair
    members = ["llama", "qwen"]
    for number in (0, 1, 2):
        calls = [lambda one=one, number=number: one.barrier(number, members, WAIT_S) for one in (worker, learner)]
        assert network.run_during(*calls) == [[], []]
    assert network.carried.count("Barrier") == 6


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_barrier_opens_although_a_message_was_lost(network, pair, lost):
    """The question, the answer to it, or the news of the opening: it is asked again every second."""
    worker, learner = pair
    network.answers_to_lose, network.num_lost = ({lost - 1}, 0) if lost else (set(), 1)
    calls = [lambda one=one: one.barrier(5, ["llama", "qwen"], WAIT_S) for one in (worker, learner)]
    assert network.run_during(*calls, step_s=0.5) == [[], []]


def test_barrier_names_who_is_missing(network, pair):
    """When time runs out; coming again goes on with the wait, and the late one opens it."""
    worker, learner = pair
    network.connect("learner/gemma", "gemma")
    members = ["gemma", "llama", "qwen"]
    assert network.run_during(lambda: worker.barrier(1, members, SHORT_S)) == [["gemma", "llama"]]
    assert network.run_during(lambda: learner.barrier(1, members, SHORT_S)) == [["gemma"]]
    assert worker.barrier(1, members, 0.0) == ["gemma", "llama"]
    network.clients["learner/gemma"].barrier(1, members, 0.0)
    network.run()
    assert worker.barrier(1, members, 0.0) == learner.barrier(1, members, 0.0) == []


def test_news_of_an_earlier_barrier_open_nothing(network, pair):
    """An answer that comes late is about another number."""
    worker, _ = pair
    worker.barrier(2, ["llama", "qwen"], 0.0)
    worker.on_message(encode(BarrierState(incarnation="one", number=1, missing=[])))
    assert worker.barrier(2, ["llama", "qwen"], 0.0) == ["llama"]


def test_barrier_without_a_daemon_misses_everybody_else(network, pair):
    """Nobody can say who has come."""
    worker, _ = pair
    network.is_up = False
    assert network.run_during(lambda: worker.barrier(1, ["llama", "qwen"], SHORT_S)) == [["llama"]]
    assert worker.barrier(2, ["qwen"], SHORT_S) == []


def test_a_barrier_outlives_the_daemon(network, pair):
    """Both tell its successor where they are: also who has passed already, so that the other may pass too."""
    worker, learner = pair
    members = ["llama", "qwen"]
    worker.barrier(3, members, 0.0)
    network.run()
    learner.barrier(3, members, 0.0)
    network.clients["worker/qwen/0"].on_message, news = (lambda body: None), worker.on_message
    network.run()
    network.clients["worker/qwen/0"].on_message = news
    assert (learner.barrier(3, members, 0.0), worker.barrier(3, members, 0.0)) == ([], ["llama"])
    network.lose()
    network.restart("two")
    assert network.run_during(lambda: worker.barrier(3, members, WAIT_S), step_s=0.5) == [[]]


def test_a_subscriber_gets_requests_and_acknowledges_them(network, pair, request_for, score_of):
    """The request arrives once, is gone from the exchange, and its score reaches the watch of who asked."""
    worker, learner = pair
    engine = network.connect("worker/llama/0", "llama")
    engine.subscribe(["score_request"])
    student = network.connect("learner/qwen", "qwen")
    student.fetch(["p1"], kinds=["score"], limit=1, max_age_versions=None)
    asked = request_for("llama")
    worker.publish([asked])
    network.run()
    assert [item.record for item in engine.take()] == [asked]
    assert "q1" not in network.core.index
    engine.publish([score_of(asked)])
    network.run()
    assert ids(student.take()) == ["s1"]
    assert learner.take() == []


@pytest.mark.parametrize("event", ["lost", "restart", "forgotten"])
def test_a_subscription_is_renewed(network, pair, request_for, event):
    """Whether the message was lost, the daemon restarted, or the client was forgotten."""
    worker, _ = pair
    engine = network.connect("worker/llama/0", "llama")
    network.run()
    engine.subscribe(["score_request"])
    if event == "lost":
        network.lose()
    elif event == "restart":
        network.run()
        network.restart("two")
    else:
        network.run()
        network.now_s += 100
        network.core.tick(network.now_s)
    network.pass_time(5)
    worker.publish([request_for("llama")])
    network.run()
    assert ids(engine.take()) == ["q1"]


def test_an_ended_subscription_brings_nothing_more(network, pair, request_for):
    """An empty list of kinds."""
    worker, _ = pair
    engine = network.connect("worker/llama/0", "llama")
    engine.subscribe(["score_request"])
    engine.subscribe([])
    worker.publish([request_for("llama")])
    network.pass_time(5)
    assert engine.take() == []


def test_garbage_from_the_daemon_is_counted(pair):
    """It neither raises nor counts as life."""
    _, learner = pair
    learner.on_message(b"garbage")
    assert learner.counts["malformed"] == 1


def test_a_record_that_this_client_cannot_read_is_counted_and_done_with(network, pair, outcome):
    """The daemon passes bodies on unread. It is not delivered for ever, and does not hide its neighbours."""
    _, learner = pair
    learner.fetch(["p1"], kinds=["outcome"], limit=4, max_age_versions=None)
    network.run()
    bad = msgpack.packb(msgpack.unpackb(encode(outcome("bad"))) | {"reward": "high"})
    put = put_of_bodies(bad, encode(outcome("good")))
    network.under_way.append(("worker/qwen/0", encode(put)))
    network.pass_time(60)
    assert ids(learner.take()) == ["good"]
    assert learner.counts["unreadable"] == 1
    assert network.core.stat(network.now_s).unacknowledged == 0


def delivery(*records):
    """A message with these records."""
    raws = [msgspec.Raw(encode(record)) for record in records]
    return Deliver(incarnation="one", records=raws, ages_versions=[0] * len(raws), delivery=1)


@pytest.mark.parametrize("bound", [{"inbox_records": 2}, {"inbox_bytes": 1000}])
def test_a_full_inbox_takes_nothing_and_loses_nothing(outcome, bound):
    """In records or in bytes. What did not fit is new when it comes again; what was taken is not."""
    inbox = Inbox(Counter(), ClientLimits(**bound))
    records = [outcome(f"r{number}", completion=bytes(600)) for number in range(3)]
    assert [inbox.take_in(delivery(record)) for record in records] == [[], [], None]
    assert inbox.take_in(delivery()) == []
    assert ids(inbox.take()) == ["r0", "r1"]
    assert inbox.take_in(delivery(*records)) == []
    assert ids(inbox.take()) == ["r2"]


def test_small_publishes_are_gathered_while_the_daemon_is_at_work(network, pair, outcome):
    """One message for all that came meanwhile, in their order; nothing waits for more."""
    worker, learner = pair
    learner.fetch([f"p{n}" for n in range(50)], kinds=["outcome"], limit=4, max_age_versions=None)
    network.run()
    for number in range(50):
        worker.publish([outcome(f"r{number}", prompt_id=f"p{number}")])
    network.run()
    assert network.carried.count("Put") == LIMITS.small_puts + 1
    assert ids(learner.take()) == [f"r{number}" for number in range(50)]
    assert worker.counts["stored"] == 50


def test_nothing_is_gathered_for_long(network, pair, outcome):
    """A daemon far away answers late; what is published meanwhile is sent all the same."""
    worker, _ = pair
    for number in range(LIMITS.small_puts + 5):
        worker.publish([outcome(f"r{number}", prompt_id=f"p{number}")])
    assert len(network.under_way) == LIMITS.small_puts
    worker.on_tick(network.now_s + LIMITS.gather_s / 2)
    assert len(network.under_way) == LIMITS.small_puts
    worker.on_tick(network.now_s + LIMITS.gather_s)
    assert len(network.under_way) == LIMITS.small_puts + 1
    network.run()
    assert worker.counts["stored"] == LIMITS.small_puts + 5


def test_what_fills_no_message_waits_for_room_too(network, rollout):
    """It goes with the next answer; nothing that is unanswered is dropped for it."""
    worker = network.connect("worker/qwen/0", "qwen", unacknowledged_bytes=1_000_000)
    network.run()
    worker.publish([rollout("g0", group=60, tokens=1000)])
    worker.publish([rollout("g1", prompt_id="p1", group=16, tokens=1000)])
    worker.on_tick(network.now_s + 1.0)
    assert [kind_of(body) for _, body in network.under_way].count("Put") == 1
    network.run()
    assert (worker.counts["stored"], worker.counts.get("dropped", 0)) == (2, 0)


def test_a_daemon_that_stores_nothing_is_told_of_once(network, pair, outcome):
    """When it begins and when it ends: in the log of each of two clients; who drops records says that too."""
    worker, _ = pair
    failures = ["disk_full"]
    network.restart("two", failure=lambda: failures[0])
    with capture_logs() as logs:
        for number in range(200):
            worker.publish([outcome(f"r{number}", completion=bytes(100_000))])
            network.pass_time(0.5)
        failures[0] = ""
        network.pass_time(60)
    events = [entry["event"] for entry in logs]
    assert (events.count("the exchange cannot store records"), events.count("the exchange stores records again")) == (
        2,
        2,
    )
    dropped = [entry["records"] for entry in logs if "dropped" in entry["event"]]
    assert 0 < len(dropped) <= worker.counts["dropped"].bit_length()


def test_who_waits_at_a_barrier_hears_how_far_the_others_are(network, pair):
    """What they said with their last Ping, asked again with every Ping of one's own."""
    worker, learner = pair
    worker.tell(lambda: 7)
    learner.barrier(1, ["llama", "qwen"], 0.0)
    network.pass_time(3)
    assert (learner.progress_of("qwen"), learner.progress_of("gemma")) == (7, 0)
    worker.tell(lambda: 8)
    network.pass_time(3)
    assert learner.progress_of("qwen") == 8
