"""A worker's life: what it samples under which version, and in which order others hear of it."""

import itertools
import math
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mrl.config.policy_tables import LearnerTable
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import EngineUsage, Sampling
from mrl.errors import EngineError, EngineLost, PeerLost, RoleFailed
from mrl.metrics.telemetry import Telemetry
from mrl.records.codec import decode, encode
from mrl.records.rollouts import (
    Groups,
    GroupsAck,
    WeightsNotice,
    WorkGrant,
    WorkItem,
    WorkRequest,
    worker_message_decoder,
)
from mrl.records.telemetry_messages import MetricsRecord, Span, SpansRecord, TelemetryRecord
from mrl.records.version import Version
from mrl.rollout import weight_sync
from mrl.rollout.link import WorkerLink, WorkerProgress
from mrl.rollout.loop_options import LoopOptions
from mrl.rollout.sampling import Sampler
from mrl.rollout.worker_counters import WorkerTotals
from mrl.rollout.worker_loop import RolloutLoop
from mrl.weights.canary import canary_sequences
from mrl.weights.publish import Publisher

VOCAB = 1000


class Learner:
    """Grants what is asked for, two groups at most, under the newest published weights; remembers what it got."""

    def __init__(self, folder: Path, model) -> None:
        self._publisher, self._model = Publisher(folder, "a"), model
        self.link = WorkerLink("w")
        self.link.open(self._answer, lambda: None)
        self.grants_the_newest_alone = False
        """Nothing to a worker that would sample under older weights."""
        self.asked: list[WorkRequest] = []
        self.done: set[int] = set()
        self.got: list[Groups] = []
        self.prompt_ids: list[str] = []
        self.told: list[TelemetryRecord] = []

    def publish(self, step: int, *, torn: bool = False) -> None:
        """A new version; `torn` spoils its file."""
        path = self._publisher.publish(self._model, Version(0, step), canary_sequences(VOCAB))
        if torn:
            path.with_name("model.safetensors").write_bytes(b"torn")
        self.notice = WeightsNotice(version=Version(0, step), manifest_path=str(path))

    def _answer(self, body: bytes) -> bool:
        message = decode(body, worker_message_decoder)
        if isinstance(message, Groups):
            self.got.append(message)
            tickets = [group.ticket for group in (*message.groups, *message.stale)]
            self.done.update(int(ticket.partition(".")[2]) for ticket in tickets)
            self.link.on_message(encode(GroupsAck(tickets=tickets, weights=self.notice)))
            return True
        self.asked.append(message)
        step = self.notice.version.step
        free = [n for n in range(len(self.prompt_ids)) if f"0.{n}" not in message.holding and n not in self.done]
        if self.grants_the_newest_alone and message.serving not in (None, self.notice.version):
            free = []
        items = [
            WorkItem(ticket=f"0.{n}", position=n, prompt_id=self.prompt_ids[n], group_size=2, step=step)
            for n in free[: message.max_groups]
        ]
        self.link.on_message(encode(WorkGrant(items=items, weights=self.notice)))
        return True


@pytest.fixture
def learner(tmp_path, tiny_model, pool) -> Learner:
    """A learner at version 0.0 that has prompts to grant."""
    made = Learner(tmp_path, tiny_model(seed=1, vocab_size=VOCAB))
    made.publish(0)
    made.prompt_ids = [pool.prompt_at(n).prompt_id for n in range(4)]
    return made


@pytest.fixture
def make_loop(learner, tiny_model, pool, receiver, tmp_path):
    """A worker's loop with these duties, around an engine of its own."""
    tiny_model(seed=2, vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")

    def make(*, prompt_tokens: int = 2, max_new_tokens: int = 4, max_running: int = 8, totals=None, **options):
        sampling = Sampling(1.0, max_new_tokens, tuple(receiver.eos_ids))
        engine = EmbeddedEngine(tmp_path / "model", sampling, device="cpu", max_running=max_running)
        prompt = np.arange(5, 5 + prompt_tokens, dtype=np.int32)
        sampler = Sampler("a", 1, engine, pool, lambda text: prompt, receiver.completion_bytes)
        told = {
            "max_answers": lambda in_flight: 4,
            "publish": lambda groups: None,
            "max_staleness_versions": 2,
            **options,
        }
        each_call_a_second = itertools.count().__next__  # however quick a thing is, its span is long
        telemetry = Telemetry("worker/a/0", "a", learner.told.append, monotonic=each_call_a_second)
        given = LoopOptions(**told), totals
        return RolloutLoop(sampler, learner.link, telemetry, *given, group_size=2, learner_bound_s=30.0)

    return make


def play(loop: RolloutLoop, script: Iterator[bool]) -> None:
    """Run the loop to the end of a script, which is looked into at every turn."""
    loop.run(lambda: next(script, True))


def test_rates_begin_when_the_engine_is_there(make_loop):
    """What a worker counts is made before: it may await a first turn."""
    totals = WorkerTotals(-math.inf)
    assert make_loop(totals=totals).totals is totals
    assert totals.started_s > 0


def tickets(got: list[Groups]) -> list[str]:
    return [group.ticket for message in got for group in message.groups]


def versions(got: list[Groups]) -> set[Version]:
    groups = [group for message in got for group in message.groups]
    return {span.version for group in groups for answer in group.answers for span in answer.versions}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Refused weights are tried again at once."""
    monkeypatch.setattr("mrl.rollout.weight_sync.REFUSED_PAUSE_S", 0.0)


def test_peers_hear_of_groups_before_the_learner_does(make_loop, learner):
    """What a synchronous run relies on: when the learner has the groups, the exchange has what they give."""
    calls = []
    lost = {"exchange/too_large": 1.0}
    loop = make_loop(
        publish=lambda groups: calls.append((len(groups), len(learner.got))), losses=lambda: lost, in_step=True
    )

    loop.run(lambda: bool(learner.got))

    assert calls == [(2, 0)]
    assert lost.items() <= [one.values for one in learner.told if isinstance(one, MetricsRecord)][-1].items()
    assert tickets(learner.got) == ["0.0", "0.1"]
    assert learner.asked[0].max_groups == 2


def test_every_group_is_sampled_once_and_new_ones_come_in_while_others_run(make_loop, learner):
    """Room for two groups, many to sample: each ticket is delivered once, and no request forgets what is held."""
    learner.prompt_ids *= 5
    loop = make_loop(max_new_tokens=24)

    loop.run(lambda: len(tickets(learner.got)) >= 20)

    assert sorted(tickets(learner.got)) == sorted(f"0.{number}" for number in range(20))
    assert any(request.holding and request.max_groups for request in learner.asked)
    assert loop.totals.groups == 20
    assert loop.totals.slot_seconds > 0


def test_nothing_is_sampled_under_an_older_version_where_only_the_newest_will_do(make_loop, learner):
    """Weights that cannot be installed leave a synchronous worker idle, and its work with the learner."""
    loop = make_loop(in_step=True)

    def script() -> Iterator[bool]:
        while not learner.got:
            yield False
        learner.got.clear()
        learner.publish(1, torn=True)
        while loop.totals.weights_refused < 3:
            yield False
        assert learner.got == []
        assert learner.asked[-1].holding == []
        learner.publish(1)
        while not learner.got:
            yield False

    play(loop, script())

    assert versions(learner.got) == {Version(0, 1)}


def test_a_worker_says_what_it_would_sample_under(make_loop, learner):
    """Where that is too old for more work, it gets some as soon as it serves what the learner told of."""
    learner.grants_the_newest_alone = True
    loop = make_loop()

    def script() -> Iterator[bool]:
        while len(tickets(learner.got)) < 4:
            yield False
        learner.asked.clear()
        learner.publish(1)
        learner.prompt_ids *= 2
        while len(tickets(learner.got)) < 8:
            yield False

    play(loop, script())

    serving = [request.serving for request in learner.asked if request.max_groups]
    assert (serving[0], serving[-1]) == (Version(0, 0), Version(0, 1))
    assert serving == sorted(serving)
    assert versions(learner.got[:1]) == {Version(0, 0)}
    later = [message for message in learner.got if set(tickets([message])) & {f"0.{n}" for n in range(4, 8)}]
    assert versions(later) == {Version(0, 1)}


def test_an_idle_worker_goes_round_while_weights_are_loaded(make_loop, learner, monkeypatch):
    """Whoever stops it, lets it sleep or asks for scores does not wait for a broadcast's members.

    And what work there is, is done under the weights that are served.
    """
    release, load, turns = threading.Event(), EmbeddedEngine.load, []

    def slow(engine, folder, version, digests=None):
        assert version == Version(0, 0) or release.wait(120.0)
        load(engine, folder, version, digests)

    monkeypatch.setattr(EmbeddedEngine, "load", slow)
    loop = make_loop()

    def script() -> Iterator[bool]:
        while len(tickets(learner.got)) < 4:
            yield False
        learner.publish(1)
        while not loop._updates.is_loading:
            yield False
        for _ in range(3):
            yield False
            turns.append(loop._updates.is_loading)
        learner.prompt_ids *= 2
        while len(tickets(learner.got)) < 8:
            yield False
        release.set()

    play(loop, script())

    assert turns == [True] * 3
    assert versions(learner.got) == {Version(0, 0)}


def test_all_tries_of_refused_weights_take_less_than_a_learner_waits_for_groups():
    """The worker knows the reason, and ends with it; the learner would say that nothing came."""
    pauses_s = [min(weight_sync.MAX_REFUSED_PAUSE_S, 0.5 * 2.0**k) for k in range(weight_sync.MAX_REFUSED_IN_A_ROW)]

    assert sum(pauses_s) < 0.7 * LearnerTable().data_timeout_s


def test_refused_weights_do_not_hold_up_sampling_and_newer_ones_are_taken_at_once(make_loop, learner, monkeypatch):
    """The same version is tried again only after a pause, in which an asynchronous worker goes on with what it has."""
    monkeypatch.setattr("mrl.rollout.weight_sync.REFUSED_PAUSE_S", 3600.0)
    monkeypatch.setattr("mrl.rollout.weight_sync.MAX_REFUSED_PAUSE_S", 3600.0)
    learner.prompt_ids *= 10
    loop = make_loop(max_answers=lambda in_flight: 2)

    def script() -> Iterator[bool]:
        while not learner.got:
            yield False
        learner.publish(1, torn=True)
        while not loop.totals.weights_refused:
            yield False
        delivered = len(tickets(learner.got))
        while len(tickets(learner.got)) < delivered + 5:
            yield False
        assert loop.totals.weights_refused == 1
        learner.publish(2)
        while Version(0, 2) not in versions(learner.got):
            yield False

    play(loop, script())


def test_a_worker_says_whether_it_loads_and_how_far_it_is(make_loop, learner, monkeypatch):
    """While its thread is in the load of the first weights, and then by the tokens that it has sampled."""
    load, seen = EmbeddedEngine.load, []

    def watched(engine, folder, version, digests=None):
        seen.append(loop._progress())
        load(engine, folder, version, digests)

    monkeypatch.setattr(EmbeddedEngine, "load", watched)
    loop = make_loop(max_new_tokens=50)

    def script() -> Iterator[bool]:
        while not learner.got:
            seen.append(loop._progress())
            yield False
        seen.append(loop._progress())  # a fast machine has sampled all by then, and nothing at the look before

    play(loop, script())

    loading = [one for one in seen if one.is_loading]
    assert loading == [WorkerProgress(0, is_loading=True)] * 2  # at the start, and in `load`
    counts = [one.num_done for one in seen]
    assert counts == sorted(counts)
    assert counts[-1] > 0
    monkeypatch.setattr(EmbeddedEngine, "doing", "awaiting environments", raising=False)
    assert loop._progress().is_loading, "whoever waits for environments is not given up"


def test_a_worker_waits_for_a_learner_that_answers_for_as_long_as_it_takes(make_loop, learner):
    """It may be training; one that does not answer is lost."""
    now_s = [0.0]
    loop = make_loop()
    loop._clock = learner.link._clock = lambda: now_s[0]
    learner.prompt_ids = []

    def script() -> Iterator[bool]:
        for _ in range(10):
            now_s[0] += 10.0
            yield False
        learner.link.open(lambda body: True, lambda: None)
        for _ in range(10):
            now_s[0] += 10.0
            yield False

    with pytest.raises(PeerLost, match="no message from learner/a within 30 s"):
        play(loop, script())
    assert now_s[0] == 140.0


def test_a_worker_whose_first_weights_are_refused_hears_of_newer_ones(make_loop, learner, monkeypatch):
    """As of a version that was pruned before the worker came to it; others keep the learner going."""
    monkeypatch.setattr("mrl.rollout.weight_sync.REFUSED_PAUSE_S", 3600.0)
    monkeypatch.setattr("mrl.rollout.weight_sync.MAX_REFUSED_PAUSE_S", 3600.0)
    learner.publish(0, torn=True)
    loop = make_loop()

    def script() -> Iterator[bool]:
        while not loop.totals.weights_refused:
            yield False
        learner.publish(1)
        while not learner.got:
            yield False

    play(loop, script())

    assert versions(learner.got) == {Version(0, 1)}


def test_new_weights_are_taken_while_answers_are_in_flight(make_loop, learner):
    """Answers begun under the old version end under the new one, and say which token is whose."""
    loop = make_loop(max_new_tokens=200)
    collect, told = loop._engine.collect, []

    def collect_little(timeout_s: float):
        if loop._engine.usage().generated_tokens > 8 and not told:
            told.append(True)
            learner.publish(1)
            loop._link.on_message(encode(GroupsAck(tickets=[], weights=learner.notice)))
        return collect(0.0)

    loop._engine.collect = collect_little
    loop.run(lambda: bool(learner.got))

    spans = [answer.versions for message in learner.got for group in message.groups for answer in group.answers]
    assert any([span.version.step for span in one] == [0, 1] for one in spans)
    assert loop.totals.last.version == Version(0, 1)


@pytest.mark.parametrize("step", [2, 3])
def test_a_group_that_can_only_end_too_stale_is_given_up(make_loop, learner, step):
    """One of its answers has ended under version 0, the other one has only begun."""
    loop = make_loop(max_new_tokens=50, max_running=1, max_staleness_versions=2)
    learner.prompt_ids = learner.prompt_ids[:1]
    arrive = loop._flights.arrive

    def arrive_and_tell(finished):
        complete = arrive(finished)
        if finished and not complete:
            learner.publish(step)
            loop._link.on_message(encode(GroupsAck(tickets=[], weights=learner.notice)))
        return complete

    loop._flights.arrive = arrive_and_tell
    loop.run(lambda: bool(learner.done))

    stale = [one for message in learner.got for one in message.stale]
    assert [one.ticket for one in stale] == (["0.0"] if step == 3 else [])
    assert all(0 < one.num_tokens <= 50 for one in stale)
    assert tickets(learner.got) == ([] if step == 3 else ["0.0"])
    assert (loop._engine.usage().running, loop._engine.usage().waiting) == (0, 0)


class Leased:
    """A lease that is lost when told, and regained in so many slots; notes what is said to be in use."""

    def __init__(self) -> None:
        self.slots, self.is_lost = 4, False
        self.in_use: list[int] = []

    def __call__(self, in_flight: int) -> int:
        self.in_use.append(in_flight)
        self.is_lost = self.is_lost and in_flight > 0
        return 0 if self.is_lost else self.slots

    def lose(self) -> None:
        self.slots, self.is_lost = 0, True


@pytest.mark.parametrize(("regained", "finished"), [(4, ["0.0", "0.1"]), (2, ["0.0"])])
def test_what_is_in_flight_rests_without_a_lease_and_goes_on_under_the_next(make_loop, learner, regained, finished):
    """No token is sampled meanwhile, nothing is said to be in use, and what the new lease has no room for is granted
    anew."""
    lease = Leased()
    learner.prompt_ids = learner.prompt_ids[:2]
    loop = make_loop(max_new_tokens=200, max_answers=lease, has_lost_lease=lambda: lease.is_lost, rests_unleased=True)
    collect = loop._engine.collect
    loop._engine.collect = lambda timeout_s: collect(0.0)

    def script() -> Iterator[bool]:
        while loop._engine.usage().generated_tokens < 8:
            yield False
        sampled = loop._engine.usage().generated_tokens
        lease.lose()
        lease.in_use.clear()
        for _ in range(3):
            yield False
        assert loop._engine.usage().generated_tokens == sampled
        assert lease.in_use[-1] == 0
        learner.asked.clear()
        lease.slots = regained
        yield False
        assert set(loop._link._work) == set(finished)
        while not learner.got:
            yield False

    play(loop, script())
    assert tickets(learner.got)[0] in finished
    assert loop._engine.usage().generated_tokens <= 2 * 2 * 200


def test_what_a_server_samples_by_itself_is_given_up_with_the_lease(make_loop, learner):
    """It would run on without one; the learner grants it anew."""
    lease = Leased()
    learner.prompt_ids = learner.prompt_ids[:2]
    loop = make_loop(max_new_tokens=200, max_answers=lease, has_lost_lease=lambda: lease.is_lost)
    collect = loop._engine.collect
    loop._engine.collect = lambda timeout_s: collect(0.0)

    def script() -> Iterator[bool]:
        while loop._engine.usage().generated_tokens < 8:
            yield False
        lease.lose()
        yield False
        assert (loop._engine.usage().running, loop._link._work) == (0, {})

    play(loop, script())


@pytest.mark.parametrize("goes_idle", [False, True])
def test_nothing_is_delivered_before_its_version_is_proved(make_loop, learner, monkeypatch, goes_idle):
    """A canary that takes long holds what was sampled meanwhile; the groups come when it has passed."""
    learner.grants_the_newest_alone = goes_idle
    release, score = threading.Event(), EmbeddedEngine.score

    def slow(engine, token_ids):
        assert engine.version == Version(0, 0) or release.wait(120.0)
        return score(engine, token_ids)

    monkeypatch.setattr(EmbeddedEngine, "score", slow)
    learner.prompt_ids *= 100
    loop = make_loop()

    def script() -> Iterator[bool]:
        while not learner.got:
            yield False
        learner.publish(1)
        while not len(loop._unproved):
            yield False
        assert versions(learner.got) == {Version(0, 0)}
        release.set()
        while versions(learner.got) == {Version(0, 0)}:
            yield False

    play(loop, script())

    assert versions(learner.got) == {Version(0, 0), Version(0, 1)}


def test_an_engine_that_serves_wrong_weights_is_replaced_and_its_groups_sampled_again(make_loop, learner, monkeypatch):
    """The canary of the second version fails once: what was sampled under it is not believed, and not lost."""
    score, fails = EmbeddedEngine.score, [True]
    monkeypatch.setattr(EmbeddedEngine, "checksums", lambda engine: None)

    def wrong(engine, token_ids):
        if engine.version == Version(0, 1) and fails:
            while not len(loop._unproved):  # until something was sampled under the wrong weights
                pass
            fails.clear()
            return [[0.0] * (len(row) - 1) for row in token_ids]
        return score(engine, token_ids)

    monkeypatch.setattr(EmbeddedEngine, "score", wrong)
    learner.prompt_ids *= 100
    loop = make_loop()

    def script() -> Iterator[bool]:
        while not learner.got:
            yield False
        learner.publish(1)
        while loop.totals.engine_restarts == 0:
            yield False
        assert loop._again, "what was held is to be sampled again"
        lost = {item.ticket for item in loop._again}
        while not lost <= set(tickets(learner.got)):
            yield False

    play(loop, script())

    assert versions(learner.got) == {Version(0, 0), Version(0, 1)}
    assert len(tickets(learner.got)) == len(set(tickets(learner.got)))


def test_an_engine_that_is_lost_again_and_again_ends_the_worker(make_loop, learner, monkeypatch):
    """With the reason of the last loss."""

    def lost(engine, timeout_s):
        raise EngineLost("the server ended with code 1")

    monkeypatch.setattr(EmbeddedEngine, "collect", lost)

    with pytest.raises(RoleFailed, match=r"lost 3 times in a row without a group: the server ended with code 1"):
        make_loop().run(lambda: False)


def test_losses_between_which_groups_were_delivered_do_not_end_the_worker(make_loop, learner, monkeypatch):
    """An engine that is lost now and then is of use: five times here, three in a row would be the end."""
    collect, delivered = EmbeddedEngine.collect, [-1]

    def lost_after_each_delivery(engine, timeout_s):
        if len(delivered) <= 5 and len(tickets(learner.got)) > delivered[-1]:
            delivered.append(len(tickets(learner.got)))
            raise EngineLost("the server ended with code 1")
        return collect(engine, timeout_s)

    monkeypatch.setattr(EmbeddedEngine, "collect", lost_after_each_delivery)
    learner.prompt_ids *= 5
    loop = make_loop(max_answers=lambda in_flight: 2)

    loop.run(lambda: loop.totals.engine_restarts == 5 and len(tickets(learner.got)) > delivered[-1])

    assert delivered[1] == 0
    assert sorted(tickets(learner.got)) == [f"0.{number}" for number in range(len(tickets(learner.got)))]


def test_an_engine_that_comes_up_late_and_not_at_once_is_waited_for(make_loop, learner, monkeypatch):
    """A large model may take longer to start than a learner may be silent; what was lost is sampled then."""
    collect, restart, now_s = EmbeddedEngine.collect, EmbeddedEngine.restart, [0.0]
    losses = ["while sampling", "at its restart"]

    def lost(engine, timeout_s):
        if len(losses) == 2:
            raise EngineLost(losses.pop(0))
        return collect(engine, timeout_s)

    def slowly(engine):
        now_s[0] += 1000.0
        if losses:
            raise EngineLost(losses.pop(0))
        restart(engine)

    monkeypatch.setattr(EmbeddedEngine, "collect", lost)
    monkeypatch.setattr(EmbeddedEngine, "restart", slowly)
    loop = make_loop()
    loop._clock = lambda: now_s[0]

    loop.run(lambda: bool(learner.got))

    assert loop.totals.engine_restarts == 2


@pytest.mark.parametrize(("full", "refilled_at"), [(EngineUsage(2, 3, 0.1, 0), 4), (EngineUsage(2, 0, 0.95, 0), 0)])
def test_a_full_engine_is_given_no_more(make_loop, learner, monkeypatch, full, refilled_at):
    """One that holds more than a group of answers which it does not sample yet, or whose cache is full.

    An empty one is never full, nor one that, whatever it said a second ago, can run all but a group of what is left.
    """
    monkeypatch.setattr(EmbeddedEngine, "usage", lambda engine: full)
    loop = make_loop(max_answers=lambda in_flight: 100)
    learner.prompt_ids *= 100
    in_flight = [0]

    def done() -> bool:
        in_flight.append(loop._flights.num_answers)
        return len(tickets(learner.got)) >= 80

    loop.run(done)

    assert max(in_flight) > 80
    refilled = [before for before, now in pairwise(in_flight) if now > before]
    assert max(refilled) <= refilled_at
    assert (max(refilled) > 0) == (refilled_at > 0)


def test_peers_are_served_while_there_is_no_work(make_loop, learner):
    """And only once there are proved weights to serve with."""
    served = []

    class Serving:
        def serve(self, is_proved) -> None:
            assert is_proved(loop._engine.version)
            served.append(loop._engine.version)

        def values(self) -> dict[str, float]:
            return {}

    learner.prompt_ids = []
    loop = make_loop(scorer=Serving())
    loop.run(lambda: len(served) >= 2)

    assert set(served) == {Version(0, 0)}


def spans_told(loop: RolloutLoop, learner: Learner) -> list[Span]:
    loop._telemetry.tell_spans(is_last=True)
    return [span for record in learner.told if isinstance(record, SpansRecord) for span in record.spans]


def test_a_worker_tells_what_it_does_and_awaits(make_loop, learner):
    """Sampling while answers are in flight, waiting for work when there is none; loading and verifying beside it."""
    loop = make_loop(max_new_tokens=24)

    def script() -> Iterator[bool]:
        while len(tickets(learner.got)) < 4:
            yield False
        yield False  # a turn without work

    play(loop, script())

    spans = spans_told(loop, learner)
    assert {"sampling", "delivering", "awaiting work"} <= {span.kind for span in spans if not span.is_beside}
    assert {"loading weights", "verifying"} == {span.kind for span in spans if span.is_beside}
    assert {span.whom for span in spans if span.kind == "awaiting work"} == {"learner/a"}
    assert all(span.is_wait for span in spans if span.kind.startswith("awaiting"))


def test_a_worker_without_a_lease_says_whom_it_waits_for(make_loop, learner):
    """It is the allocator, not the learner."""
    turns = iter(range(3))
    loop = make_loop(max_answers=lambda in_flight: 0)
    loop.run(lambda: next(turns, None) is None)

    told = {(span.kind, span.whom) for span in spans_told(loop, learner)}
    assert ("awaiting lease", "allocator") in told
    assert not [kind for kind, _ in told if kind == "awaiting work"]


def test_when_a_lease_was_lost_nothing_runs_any_more(make_loop, learner, monkeypatch):
    """From that turn on; what was given up is granted anew with the next lease, and delivered once."""
    leases, seen = [4, 4, 4, 0, 0, 4, 4], list[tuple[int, int, int]]()
    is_lost = []

    def max_answers(in_flight: int) -> int:
        is_lost[:] = [True] if in_flight and is_lost else []  # until nothing runs
        return leases[0] if leases else 4

    loop = make_loop(max_answers=max_answers, has_lost_lease=lambda: bool(is_lost))
    monkeypatch.setattr(EmbeddedEngine, "collect", lambda engine, timeout_s: [])  # no answer ends

    def done() -> bool:
        usage = loop._engine.usage()
        if leases:  # that of the turn before
            seen.append((leases.pop(0), loop._flights.num_answers, usage.running + usage.waiting))
            is_lost[:] = [True] if leases == [0, 0, 4, 4] else []
        if not leases:
            monkeypatch.undo()
        return len(learner.done) == len(learner.prompt_ids)

    loop.run(done)

    assert seen[1:] == [(4, 4, 4), (4, 4, 4), (0, 0, 0), (0, 0, 0), (4, 4, 4), (4, 4, 4)]
    assert sorted(tickets(learner.got)) == sorted(f"0.{n}" for n in range(len(learner.prompt_ids)))


@pytest.mark.parametrize("smaller", [2, 0])
def test_what_a_smaller_lease_has_no_room_for_runs_to_its_end(make_loop, monkeypatch, smaller):
    """Nothing is given up, and nothing begins; also where the lease is none, which hears how many answers run on."""
    monkeypatch.setattr(EmbeddedEngine, "collect", lambda engine, timeout_s: [])  # no answer ends
    leases, in_flight, told = [4, 4, smaller, smaller, smaller], list[int](), list[int]()
    loop = make_loop(max_answers=lambda in_flight: told.append(in_flight) or leases[0])

    def done() -> bool:
        in_flight.append(loop._flights.num_answers)
        leases.pop(0)
        return not leases

    loop.run(done)
    assert in_flight == [0, 4, 4, 4, 4]
    assert (told[0], told[-1], set(told)) == (0, 4, {0, 4})


def test_a_lost_lease_gives_back_what_was_to_be_sampled_again(make_loop, monkeypatch):
    """Nobody else would get it while this worker has no lease."""
    loop = make_loop(has_lost_lease=lambda: True)
    item = WorkItem(ticket="0.7", position=7, prompt_id="p", group_size=2, step=0)
    loop._again, given_up = [item], []
    monkeypatch.setattr(loop._link, "give_up", given_up.extend)
    loop._keep_lease()
    assert (loop._again, given_up) == ([], [item])


def test_an_engine_that_starts_anew_uses_no_slot(make_loop, monkeypatch):
    """A server may take minutes."""
    told = []
    loop = make_loop(max_answers=lambda in_flight: told.append(in_flight) or 4)
    monkeypatch.setattr(EmbeddedEngine, "restart", lambda engine: told.append("restart"))
    loop._recover(EngineLost("gone"))
    assert told == [0, "restart"]


def test_a_synchronous_worker_waits_for_weights_and_verdicts(make_loop, learner):
    """What runs beside sampling elsewhere is waited for here."""
    loop = make_loop(in_step=True)
    loop.run(lambda: bool(learner.got))

    assert {"awaiting weight update", "awaiting verdicts"} <= {span.kind for span in spans_told(loop, learner)}


class Nap:
    """Tells the worker to sleep once it has sampled for a while, and wakes it after the learner has moved on."""

    def __init__(self, learner: Learner, loop_of, *, woken: bool = True) -> None:
        self._learner, self._loop_of, self._woken = learner, loop_of, woken
        self.calls: list[str] = []

    def is_due(self) -> bool:
        return not self.calls and len(self._learner.done) >= 2

    def refuse(self) -> None:
        self.calls.append("refused")

    def sleep(self) -> bool:
        engine = self._loop_of()._engine
        self.calls.append(f"asleep {engine.version} {engine.usage().running} {self._learner.asked[-1].holding}")
        self._learner.publish(1)
        return self._woken

    def awake(self) -> None:
        self.calls.append("awake")


def test_a_worker_sleeps_with_nothing_in_flight_and_goes_on_under_the_newest_weights(make_loop, learner):
    """What it gave up is granted anew; everything is delivered once."""
    learner.prompt_ids *= 3
    made = []
    nap = Nap(learner, lambda: made[0])
    made.append(make_loop(max_new_tokens=24, rest=nap))

    made[0].run(lambda: len(learner.done) == len(learner.prompt_ids))

    assert nap.calls == ["asleep None 0 []", "awake"]
    assert sorted(tickets(learner.got)) == sorted(f"0.{n}" for n in range(len(learner.prompt_ids)))
    assert versions(learner.got[-1:]) == {Version(0, 1)}


def test_an_engine_that_cannot_sleep_says_so_and_goes_on(make_loop, learner, monkeypatch):
    """Until its node ends it."""
    learner.prompt_ids *= 3
    made = []
    nap = Nap(learner, lambda: made[0])
    made.append(make_loop(max_new_tokens=24, rest=nap))

    def refuse() -> None:
        raise EngineError("the server has no route /sleep")

    monkeypatch.setattr(made[0]._engine, "sleep", refuse)
    made[0].run(lambda: len(learner.done) == len(learner.prompt_ids))
    assert nap.calls == ["refused"]


def test_what_is_sampled_again_goes_in_the_order_of_its_grants(make_loop, monkeypatch):
    """Complete or not when the engine was lost: as without the loss."""
    loop = make_loop()
    first, second, third = (
        WorkItem(ticket=f"0.{n}", position=n, prompt_id="p", group_size=2, step=0) for n in range(3)
    )
    loop._again = [third]
    monkeypatch.setattr(loop._unproved, "refuse", lambda: [second])
    monkeypatch.setattr(loop._flights, "lose", lambda: [first])
    monkeypatch.setattr(EmbeddedEngine, "restart", lambda engine: None)

    loop._recover(EngineLost("gone"))

    assert loop._again == [first, second, third]
