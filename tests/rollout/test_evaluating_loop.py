"""A worker that answers held-out prompts beside its groups; behind its link stand the intake and books of a learner."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Decoding, Engine, GenerationRequest, Sampling, generate_all
from mrl.engines.token_sampling import answer_seeds
from mrl.errors import EngineLost
from mrl.learner.held_out_ledger import Evaluated, HeldOutLedger
from mrl.learner.intake import Intake
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.metrics.telemetry import Telemetry
from mrl.records.codec import decode, encode
from mrl.records.direct_requests import LOST, DirectAnswer, DirectRefusal, DirectRequest, WorkerRoom
from mrl.records.rollouts import ScoredGroup, WeightsNotice, WorkRequest, worker_message_decoder
from mrl.records.version import Version
from mrl.rollout.direct_serving import DirectServing
from mrl.rollout.link import WorkerLink
from mrl.rollout.loop_options import LoopOptions
from mrl.rollout.sampling import Sampler
from mrl.rollout.worker_loop import RolloutLoop
from mrl.tasks.held_out import MAX_GRANTS
from mrl.tasks.pool import TaskPool, build_pool
from mrl.weights.canary import canary_sequences
from mrl.weights.publish import Publisher

VOCAB, PLACES, GROUP_SIZE = 1000, 8, 2


class Nobody:
    """In place of the socket: messages go to the intake without it."""

    def receive(self, timeout_s: float) -> list:
        time.sleep(timeout_s)
        return []

    def send(self, client: bytes, body: bytes) -> bool:
        return True

    def close(self) -> None:
        pass


class Learner:
    """Its intake, whose evaluations it looks at, and weights that it publishes."""

    def __init__(self, folder, model, pool: TaskPool, *, in_step: bool) -> None:
        self._publisher, self._model, self.pool = Publisher(folder, "a"), model, pool
        pace = SamplingLimits(
            groups_per_step=4, group_size=GROUP_SIZE, max_staleness_versions=0 if in_step else 2, total_steps=9
        )
        ledger = WorkLedger(pace, lambda position: pool.prompt_at(position).prompt_id, resumed_at=Version(0, 0))
        self.intake = Intake(Nobody(), ledger, held_out=HeldOutLedger("a"), evaluates_alone=in_step)  # type: ignore[arg-type]
        self.link = WorkerLink("w")
        self.link.open(self._answer, lambda: None)
        self.evaluated: list[Evaluated] = []
        self.groups: list[ScoredGroup] = []

    def publish(self, step: int, *, evaluates: bool = False) -> None:
        path = self._publisher.publish(self._model, Version(0, step), canary_sequences(VOCAB))
        if evaluates:
            self.intake.evaluate(Version(0, step), self.pool.held_out)
        self.intake.announce(WeightsNotice(version=Version(0, step), manifest_path=str(path)))

    def has(self, *, groups: int = 0, evaluations: int = 0) -> bool:
        """Whether so many have come by now."""
        self.groups += self.intake.arrivals()
        self.evaluated += self.intake.evaluated()
        return len(self.groups) >= groups and len(self.evaluated) >= evaluations

    def _answer(self, body: bytes) -> bool:
        answer = self.intake._answer(decode(body, worker_message_decoder))  # type: ignore[arg-type]
        self.link.on_message(encode(answer))
        return True


@pytest.fixture(scope="module")
def own_pool() -> TaskPool:
    tasks = {"trim": TaskTable(source="words", dataset="trim")}
    return build_pool(tasks, PoolTable(train_prompts=40, held_out_prompts=10))


@pytest.fixture
def site(tmp_path, tiny_model, own_pool, receiver) -> Iterator[Callable[..., tuple[Learner, RolloutLoop]]]:
    """A learner at version 0.0, and a worker of eight places whose engine takes note of what it is handed."""
    tiny_model(seed=2, vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    learners = []

    def make(
        *,
        max_new_tokens: int = 4,
        in_step: bool = False,
        share: float | None = 0.5,
        plain: Callable[[Engine], DirectServing] = lambda _: None,  # type: ignore[assignment,return-value]
    ) -> tuple[Learner, RolloutLoop]:
        model = tiny_model(seed=1, vocab_size=VOCAB)
        learner = Learner(tmp_path / "weights", model, own_pool, in_step=in_step)
        learners.append(learner)
        sampling = Sampling(1.0, max_new_tokens, tuple(receiver.eos_ids))
        engine = EmbeddedEngine(tmp_path / "model", sampling, device="cpu", max_running=PLACES)
        prompt = np.arange(5, 9, dtype=np.int32)
        sampler = Sampler("a", 1, engine, own_pool, lambda text: prompt, receiver.completion_bytes)
        options = LoopOptions(
            max_answers=lambda in_flight: PLACES,
            publish=lambda groups: None,
            max_staleness_versions=2,
            held_out_share=share,
            plain=plain(engine),
            in_step=in_step,
        )
        telemetry = Telemetry("worker/a/0", "a", lambda record: True)
        loop = RolloutLoop(sampler, learner.link, telemetry, options, group_size=GROUP_SIZE, learner_bound_s=30.0)
        return learner, loop

    yield make
    for learner in learners:
        learner.intake.close()


def in_flight_at_every_submit(loop: RolloutLoop) -> list[tuple[int, int]]:
    """(answers of groups, held-out answers) in the engine each time that it is handed something."""
    seen, submit = [], loop._engine.submit

    def noted(requests) -> None:
        submit(requests)
        seen.append(tuple(loop._in_flight[:2]))

    loop._engine.submit = noted  # type: ignore[method-assign]
    return seen


def test_held_out_prompts_are_answered_in_their_share_beside_groups(site):
    """All of them, at most four at once of eight places, while groups go on; they are no part of what groups make."""
    learner, loop = site(max_new_tokens=12)
    seen = in_flight_at_every_submit(loop)
    learner.publish(0, evaluates=True)

    loop.run(lambda: learner.has(groups=12, evaluations=1))

    (one,) = learner.evaluated
    assert one.result is not None
    assert (one.result.missing, one.result.per_task["trim"].prompts, one.result.own_token_share) == (0, 10, 1.0)
    groups_beside_the_first, first = next(state for state in seen if state[1])
    assert groups_beside_the_first > 0
    assert first <= PLACES / 2
    assert max(held_out for groups, held_out in seen if groups) <= PLACES / 2
    assert all(groups + held_out <= PLACES for groups, held_out in seen)
    held_out_ids = {prompt.prompt_id for prompt in learner.pool.held_out}
    assert not held_out_ids & {group.prompt_id for group in learner.groups}
    assert loop.totals.groups == len(learner.groups) == 12
    assert loop.totals.tokens == sum(a.versions[0].num_tokens for group in learner.groups for a in group.answers)
    assert loop.totals.held_out_slot_seconds > 0
    assert 0 < loop.totals.values(loop._clock())["rollout/held_out_share"] < 1


def test_a_worker_that_never_evaluates_asks_for_no_held_out_prompt(site):
    """Also where some wait: its learner would have none either."""
    learner, loop = site(share=None)
    asked, answer = [], learner.intake._answer

    def noted(message):
        asked.append(message)
        return answer(message)

    learner.intake._answer = noted
    learner.publish(0, evaluates=True)

    loop.run(lambda: learner.has(groups=4))

    requests = [one for one in asked if isinstance(one, WorkRequest)]
    assert {(one.max_held_out, one.max_held_out_alone) for one in requests} == {(0, 0)}
    assert loop._held_out is None


def test_every_evaluation_samples_with_the_same_seeds(site):
    """Those that a held-out prompt has by its name: equal weights give equal answers."""
    learner, loop = site(max_new_tokens=12)
    learner.publish(0, evaluates=True)
    loop.run(lambda: learner.has(evaluations=1))
    engine = EmbeddedEngine(loop._engine._model_folder, loop._engine._sampling, device="cpu", max_running=PLACES)
    engine.load(learner._publisher.folder / "0.0", Version(0, 0))
    expected = {}
    for prompt in learner.pool.held_out:
        seeds = answer_seeds(1, "a", "held-out|" + prompt.prompt_id, 0, 1)
        request = GenerationRequest("r", np.arange(5, 9, dtype=np.int32), seeds)
        ((answer,),) = generate_all(engine, [request])
        expected[prompt.text] = loop._sampler.completion_bytes(answer.token_ids).decode("utf-8", errors="replace")

    (one,) = learner.evaluated

    assert one.result is not None
    assert {shown.prompt: shown.completion for shown in one.result.answers}.items() <= expected.items()
    assert len(one.result.answers) == 3


def test_new_weights_overtake_held_out_answers_and_the_result_says_so(site):
    """They begin under the version asked for, or a newer one, and end under what is served."""
    learner, loop = site(max_new_tokens=300)
    learner.publish(0, evaluates=True)
    collect, told = loop._engine.collect, []

    def collect_little(timeout_s: float):
        if loop._flights.num_held_out and loop._engine.usage().generated_tokens > 16 and not told:
            told.append(True)
            learner.publish(1)
            loop._link.take_work(0, 1.0)
        return collect(0.0)

    loop._engine.collect = collect_little
    loop.run(lambda: learner.has(evaluations=1))

    (one,) = learner.evaluated
    assert one.result is not None
    assert (one.result.version, one.result.oldest, one.result.newest) == (Version(0, 0), Version(0, 0), Version(0, 1))
    assert 0 < one.result.own_token_share < 1


def test_an_evaluation_waits_for_the_proof_of_its_version(site, monkeypatch):
    """Groups are sampled meanwhile, and held; a held-out prompt is not begun."""
    release, score = threading.Event(), EmbeddedEngine.score

    def slow(engine, token_ids):
        assert engine.version == Version(0, 0) or release.wait(120.0)
        return score(engine, token_ids)

    monkeypatch.setattr(EmbeddedEngine, "score", slow)
    learner, loop = site()
    learner.publish(0)
    held_out_before_proof = []

    def script() -> Iterator[bool]:
        while not learner.has(groups=4):
            yield False
        learner.publish(1, evaluates=True)
        while not len(loop._unproved):
            held_out_before_proof.append(loop._flights.num_held_out)
            yield False
        held_out_before_proof.append(loop._flights.num_held_out)
        release.set()
        while not learner.has(evaluations=1):
            yield False

    turns = script()
    loop.run(lambda: next(turns, True))

    assert set(held_out_before_proof) == {0}
    (one,) = learner.evaluated
    assert one.result is not None
    assert (one.version, one.result.oldest, one.result.missing) == (Version(0, 1), Version(0, 1), 0)


def test_held_out_answers_that_an_engine_lost_are_sampled_again(site, monkeypatch):
    """The learner grants them anew, behind what groups the engine had."""
    collect, losses = EmbeddedEngine.collect, []
    learner, loop = site(max_new_tokens=12)

    def lost_once(engine, timeout_s):
        if loop._flights.num_held_out and not losses:
            losses.append(loop._in_flight)
            raise EngineLost("the server ended with code 1")
        return collect(engine, timeout_s)

    monkeypatch.setattr(EmbeddedEngine, "collect", lost_once)
    learner.publish(0, evaluates=True)
    loop.run(lambda: learner.has(groups=12, evaluations=1))

    (one,) = learner.evaluated
    assert one.result is not None
    assert one.result.missing == 0
    assert losses[0].held_out > 0
    assert loop.totals.engine_restarts == 1


def test_prompts_that_take_the_engine_down_cost_themselves(site, monkeypatch):
    """Lost again and again they are given up, and neither the worker nor its groups."""
    collect = EmbeddedEngine.collect
    learner, loop = site()

    def lost_with_them(engine, timeout_s):
        if loop._flights.num_held_out:
            raise EngineLost("the server ended with code 1")
        return collect(engine, timeout_s)

    monkeypatch.setattr(EmbeddedEngine, "collect", lost_with_them)
    monkeypatch.setattr("mrl.tasks.held_out.HeldOutTally.grant", _only_the_first(learner))
    learner.publish(0, evaluates=True)
    loop.run(lambda: learner.has(groups=12, evaluations=1))

    assert learner.evaluated[0].result is None
    assert loop.totals.engine_restarts == MAX_GRANTS
    assert len(learner.groups) == 12


def _only_the_first(learner: Learner):
    """One evaluation of one prompt."""
    from mrl.tasks.held_out import HeldOutTally

    grant = HeldOutTally.grant

    def first(book, worker, most):
        book._is_waiting &= {0}
        return grant(book, worker, most)

    return first


def test_in_a_synchronous_run_groups_and_held_out_prompts_are_never_in_the_engine_together(site):
    """First all held-out prompts of a version, eight at once, and then its groups."""
    learner, loop = site(in_step=True)
    seen = in_flight_at_every_submit(loop)

    def script() -> Iterator[bool]:
        learner.publish(0, evaluates=True)
        while not learner.has(groups=4, evaluations=1):
            yield False
        learner.intake.next_batch(0)
        learner.publish(1, evaluates=True)
        while not learner.has(groups=8, evaluations=2):
            yield False

    turns = script()
    loop.run(lambda: next(turns, True))

    assert seen == [(0, 8), (0, 2), (8, 0)] * 2
    assert [one.result and (one.version.step, one.result.own_token_share) for one in learner.evaluated] == [
        (0, 1.0), (1, 1.0)
    ]  # fmt: skip


def test_a_worker_stays_with_a_version_while_prompts_of_it_wait_and_groups_stay_fresh(site):
    """With the learner one version ahead; two ahead it takes the newest, and begins with it what waits."""
    learner, loop = site(max_new_tokens=40)
    learner.publish(0, evaluates=True)
    served_behind_one, ahead = [], []

    def script() -> Iterator[bool]:
        while not loop._flights.num_held_out:
            yield False
        learner.publish(1)
        for _ in range(6):
            loop._link.take_work(0, 0.2)  # the worker hears of the new version
            served_behind_one.append((loop._engine.version, loop._link.held_out_waiting))
            yield False
        learner.publish(2)
        loop._link.take_work(0, 0.2)
        ahead.append(loop._link.held_out_waiting)
        while loop._engine.version != Version(0, 2):
            loop._link.take_work(0, 0.2)
            yield False
        while not learner.has(evaluations=1):
            yield False

    turns = script()
    loop._engine.collect, collect = (lambda timeout_s: collect(0.0)), loop._engine.collect
    loop.run(lambda: next(turns, True))

    assert {version for version, waiting in served_behind_one if waiting} == {Version(0, 0)}
    assert ahead == [Version(0, 0)], "prompts waited when it went on"
    (one,) = learner.evaluated
    assert one.result is not None
    assert (one.result.oldest, one.result.newest, one.result.missing) == (Version(0, 0), Version(0, 2), 0)


class Asker:
    """A gateway and a voice in one: requests for eight tokens, all there from the beginning."""

    policy = "a"

    def __init__(self, count: int) -> None:
        self.coming = [DirectRequest(request_id=f"r{place}", text="x", seed=place) for place in range(count)]
        self.said: list[object] = []

    def take(self) -> list[DirectRequest]:
        found, self.coming = self.coming, []
        return found

    def send(self, message: object) -> None:
        self.said.append(message)

    def prompt(self, request) -> np.ndarray:
        return np.arange(5, 9, dtype=np.int32)

    def limit(self, request) -> int:
        return 8

    def decoding(self, request) -> Decoding:
        return Decoding(1.0, max_new_tokens=8)

    def read(self, request, sampled, *, is_cut):
        return "", ()

    def spelled(self, token_id: int) -> bytes:
        return b"x"

    def of(self, kind) -> list:
        return [one for one in self.said if isinstance(one, kind)]

    def serving(self, engine) -> DirectServing:
        return DirectServing(self, self, engine, share=0.25, group_size=GROUP_SIZE)  # type: ignore[arg-type]


def test_requests_outside_of_episodes_are_answered_in_their_share_beside_groups(site):
    """At most two of eight places at once; groups are delivered all the same, and their totals are theirs alone."""
    asker = Asker(12)
    learner, loop = site(max_new_tokens=12, plain=asker.serving)
    submit, most = loop._engine.submit, []

    def noted(requests) -> None:
        submit(requests)
        most.append(loop._in_flight)

    loop._engine.submit = noted  # type: ignore[method-assign]
    learner.publish(0)

    loop.run(lambda: learner.has(groups=8) and len(asker.of(DirectAnswer)) == 12)

    assert max(one.plain for one in most) == 2
    assert max(one.of_groups + one.plain for one in most) <= PLACES
    assert any(one.of_groups and one.plain for one in most)
    assert all(len(answer.sampled) <= 8 and answer.version == 0 for answer in asker.of(DirectAnswer))
    learner.has()
    delivered = sum(a.versions[0].num_tokens for group in learner.groups for a in group.answers)
    plain = sum(len(one.sampled) for one in asker.of(DirectAnswer))
    assert loop.totals.tokens == delivered > 0
    assert 0 < loop.totals.sampled_tokens <= loop.totals.engine_tokens - plain / 2, "by their part of the places"


def test_a_worker_without_groups_answers_them_alone(site):
    """While its learner has nothing to sample."""
    asker = Asker(3)
    learner, loop = site(plain=asker.serving)
    learner.publish(0)
    learner.intake._ledger.grant = lambda *a, **k: []  # type: ignore[method-assign]

    loop.run(lambda: learner.has() and len(asker.of(DirectAnswer)) == 3)

    assert not learner.groups


def test_an_engine_that_is_lost_gives_them_back_to_the_gateway(site, monkeypatch):
    """For another worker; it tells of no room before it serves again."""
    collect, losses = EmbeddedEngine.collect, []
    asker = Asker(2)
    learner, loop = site(max_new_tokens=12, plain=asker.serving)

    def lost_once(engine, timeout_s):
        if loop._in_flight.plain and not losses:
            losses.append(loop._in_flight)
            raise EngineLost("the server ended with code 1")
        return collect(engine, timeout_s)

    monkeypatch.setattr(EmbeddedEngine, "collect", lost_once)
    learner.publish(0)
    loop.run(lambda: learner.has(groups=4))

    assert {one.code for one in asker.of(DirectRefusal)} == {LOST}
    assert len(asker.of(DirectRefusal)) == 2
    assert [room.room for room in asker.of(WorkerRoom)] == [2, 0, 2]
