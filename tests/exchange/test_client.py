"""The client against a real core over a link that the test can cut."""

import pytest

from mrl.exchange.client import MAX_UNACKNOWLEDGED_BYTES, RESEND_S, SILENCE_S, ExchangeClient
from mrl.exchange.core import ExchangeCore
from mrl.exchange.inbox import Inbox
from mrl.records.codec import decode, encode
from mrl.records.exchange import client_message_decoder
from mrl.records.version import Version


class Network:
    """Daemon and links in one thread: `run` carries messages until none is left; `lose` drops those under way."""

    def __init__(self):
        self.now_s = 0.0
        self.clients = {}
        self.under_way = []
        self.carried = []
        self.reconnects = 0
        self.is_up = True
        self.restart("one")

    def restart(self, incarnation, *, journal=lambda payloads: ""):
        """A fresh daemon that knows nobody."""
        self.core = ExchangeCore(
            incarnation=incarnation, budget_bytes=10_000_000, per_prompt=4, max_age_versions=100,
            journal=journal, started_s=self.now_s,
        )  # fmt: skip

    def connect(self, name, policy):
        """A client of this network."""
        network = self

        class Link:
            def post(self, body):
                network.under_way.append((name, body))
                return True

            def request_reconnect(self):
                network.reconnects += 1

            def close(self, timeout_s):
                del network.clients[name]

        client = ExchangeClient.connect(
            lambda on_message, on_tick: Link(), client=name, policy=policy, clock=lambda: self.now_s
        )
        self.clients[name] = client
        return client

    def run(self):
        """Deliver everything, in both directions."""
        while self.under_way:
            name, body = self.under_way.pop(0)
            self.carried.append(kind_of(body))
            if self.is_up:
                for receiver, message in self.core.receive(name.encode(), body, self.now_s):
                    self.clients[receiver.decode()].on_message(encode(message))

    def lose(self):
        """What is under way never arrives. Returns the kinds of messages."""
        kinds = [kind_of(body) for _, body in self.under_way]
        self.under_way.clear()
        return kinds

    def pass_time(self, seconds, step_s=0.5):
        """Let time go by with ticks."""
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            for client in self.clients.values():
                client.on_tick(self.now_s)
            self.run()


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
    learner.fetch(["p1"], limit=2, max_age_versions=10, watch=True)
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
    network.pass_time(RESEND_S + 1)
    learner.fetch(["p1"], limit=1, max_age_versions=None, watch=False)
    network.run()
    assert ids(learner.take()) == ["r1"]
    network.pass_time(60)
    assert worker.counts["stored"] == 1
    assert "refused/duplicate" not in worker.counts


def test_a_lost_fetch_is_sent_again_and_counts_once(network, pair, outcome):
    """The daemon's answer, though empty, ends the repetition."""
    worker, learner = pair
    learner.fetch(["p1"], limit=1, max_age_versions=None, watch=True)
    assert network.lose() == ["Fetch"]
    network.pass_time(RESEND_S + 1)
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
    learner.fetch(["p1"], limit=1, max_age_versions=None, watch=False)
    with pytest.raises(KeyError):
        network.run()
    network.clients["learner/llama"] = learner
    for _ in range(3):
        network.now_s += 4
        for receiver, message in network.core.tick(network.now_s):
            network.clients[receiver.decode()].on_message(encode(message))
        network.run()
    assert ids(learner.take()) == ["r1"]
    assert network.core.stat(network.now_s).claims == 0


def test_asking_again_may_bring_the_same_record_again(network, pair, outcome):
    """A success helps every time an own group fails on its prompt; within one asking it comes once."""
    worker, learner = pair
    worker.publish([outcome()])
    for _ in range(2):
        learner.fetch(["p1"], limit=1, max_age_versions=None, watch=True)
        network.run()
        assert ids(learner.take()) == ["r1"]


def test_a_restarted_daemon_is_told_everything(network, pair, outcome):
    """Hello, versions, unacknowledged records and watches, as soon as its first message comes."""
    worker, learner = pair
    worker.announce(Version(0, 7))
    learner.fetch(["p1", "p2"], limit=2, max_age_versions=None, watch=True)
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
    learner.fetch(["p1"], limit=1, max_age_versions=None, watch=True)
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
    learner.fetch(["p1"], limit=1, max_age_versions=None, watch=True)
    network.run()
    network.now_s += 100
    network.core.tick(network.now_s)
    network.pass_time(5)
    worker.publish([outcome()])
    network.run()
    assert ids(learner.take()) == ["r1"]


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
    assert kept == MAX_UNACKNOWLEDGED_BYTES // 100_400
    network.is_up = True
    network.restart("two")
    network.pass_time(2 * SILENCE_S)
    assert worker.counts["stored"] == kept
    assert "r299" in network.core.shelf


def test_a_refusal_is_counted_by_its_reason_and_not_repeated(network, pair, outcome):
    """A full disk costs the record, not the link."""
    worker, _ = pair
    network.restart("two", journal=lambda payloads: "disk_full")
    worker.publish([outcome()])
    network.run()
    network.pass_time(60)
    assert worker.counts["refused/disk_full"] == 1


def test_invalid_records_are_dropped_and_counted(network, pair, outcome):
    """One record beyond the limits does not take its neighbours with it."""
    worker, _ = pair
    worker.publish([outcome("bad", completion=bytes(300_000)), outcome("good")])
    network.run()
    assert (worker.counts["invalid"], worker.counts["stored"]) == (1, 1)


def test_many_records_are_split_into_messages_of_bounded_size(network, pair, outcome):
    """Nothing exceeds the transport's limit."""
    worker, _ = pair
    worker.publish([outcome(f"r{number}", completion=bytes(200_000)) for number in range(20)])
    assert len(network.under_way) == 4
    assert max(len(body) for _, body in network.under_way) < 1_200_000
    network.run()
    assert worker.counts["stored"] == 20


def test_garbage_from_the_daemon_is_counted(pair):
    """It neither raises nor counts as life."""
    _, learner = pair
    learner.on_message(b"garbage")
    assert learner.counts["malformed"] == 1


def test_a_full_inbox_takes_nothing_and_loses_nothing(outcome):
    """What did not fit is new when it comes again."""
    inbox = Inbox(max_records=2)
    delivered = [(outcome(f"r{number}"), 0) for number in range(3)]
    assert ids(inbox.put(delivered)) == ["r0", "r1"]
    assert not inbox.has_seen(delivered[2][0])
    assert ids(inbox.take()) == ["r0", "r1"]
    assert ids(inbox.put(delivered)) == ["r2"]
