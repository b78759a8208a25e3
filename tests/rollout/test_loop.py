"""A worker's life: what it samples under which version, and in which order others hear of it."""

from pathlib import Path

import numpy as np
import pytest

from mrl.engines.embedded import EmbeddedEngine
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
from mrl.records.version import Version
from mrl.rollout.link import WorkerLink
from mrl.rollout.loop import Duties, RolloutLoop
from mrl.rollout.sampling import Sampler
from mrl.weights.canary import canary_sequences
from mrl.weights.publish import Publisher

VOCAB = 1000


class Learner:
    """Grants what is asked for, two groups at most, under the newest published weights; remembers what it got."""

    def __init__(self, folder: Path, model) -> None:
        self._publisher, self._model = Publisher(folder, "a"), model
        self.link = WorkerLink("w")
        self.link.open(self._answer, lambda: None)
        self.asked: list[WorkRequest] = []
        self.got: list[Groups] = []
        self.prompt_ids: list[str] = []

    def publish(self, step: int, *, torn: bool = False) -> None:
        """A new version; `torn` spoils its file."""
        path = self._publisher.publish(self._model, Version(0, step), canary_sequences(VOCAB))
        if torn:
            path.with_suffix(".safetensors").write_bytes(b"torn")
        self.notice = WeightsNotice(version=Version(0, step), manifest_path=str(path))

    def _answer(self, body: bytes) -> bool:
        message = decode(body, worker_message_decoder)
        if isinstance(message, Groups):
            self.got.append(message)
            tickets = [group.ticket for group in message.groups]
            self.link.on_message(encode(GroupsAck(tickets=tickets, weights=self.notice)))
            return True
        self.asked.append(message)
        step = self.notice.version.step
        items = [
            WorkItem(ticket=f"0.{n}", position=n, prompt_id=prompt_id, group_size=2, step=step)
            for n, prompt_id in enumerate(self.prompt_ids[: message.max_groups])
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
def make_loop(learner, tiny_model, pool, receiver):
    """A worker's loop with these duties."""

    def make(**duties) -> RolloutLoop:
        model = tiny_model(seed=2, vocab_size=VOCAB)
        engine = EmbeddedEngine(model, eos_ids=receiver.eos_ids, max_new_tokens=4, temperature=1.0)
        prompt = np.array([5, 7], dtype=np.int32)
        sampler = Sampler("a", 1, engine, pool, lambda text: prompt, receiver.completion_bytes)
        told = {"max_groups": lambda: 2, "publish": lambda groups: None, **duties}
        telemetry = Telemetry("worker/a/0", "a", lambda record: True)
        return RolloutLoop(sampler, learner.link, telemetry, Duties(**told), group_size=2, learner_bound_s=30.0)

    return make


def test_peers_hear_of_groups_before_the_learner_does(make_loop, learner):
    """What a synchronous run relies on: when the learner has the groups, the exchange has what they give."""
    calls = []
    loop = make_loop(publish=lambda groups: calls.append((len(groups), len(learner.got))))

    loop.run(lambda: bool(learner.got))

    assert calls == [(2, 0)]
    assert [group.ticket for group in learner.got[0].groups] == ["0.0", "0.1"]
    assert learner.asked[0].max_groups == 2


def test_nothing_is_sampled_under_an_older_version_where_only_the_newest_will_do(make_loop, learner, monkeypatch):
    """Weights that cannot be installed leave a synchronous worker idle, and its work with the learner."""
    monkeypatch.setattr("mrl.rollout.loop.REFUSED_PAUSE_S", 0.0)
    loop = make_loop(newest_only=True)
    loop.run(lambda: bool(learner.got))
    learner.got.clear()
    learner.publish(1, torn=True)

    loop.run(lambda: loop.totals.weights_refused >= 3)
    assert learner.got == []
    assert learner.asked[-1].holding == []
    learner.publish(1)
    loop.run(lambda: bool(learner.got))

    assert {group.oldest for group in learner.got[0].groups} == {Version(0, 1)}


def test_an_asynchronous_worker_samples_on_with_what_it_has(make_loop, learner, monkeypatch):
    """Until the staleness bound, older versions are of use."""
    monkeypatch.setattr("mrl.rollout.loop.REFUSED_PAUSE_S", 0.0)
    loop = make_loop()
    loop.run(lambda: bool(learner.got))
    learner.got.clear()
    learner.publish(1, torn=True)

    loop.run(lambda: bool(learner.got))

    assert {group.oldest for group in learner.got[0].groups} == {Version(0, 0)}


def test_peers_are_served_while_there_is_no_work(make_loop, learner):
    """And only once there are weights to serve with."""
    served = []

    class Serving:
        def serve(self) -> None:
            served.append(loop._sampler.engine.version)

        def values(self) -> dict[str, float]:
            return {}

    learner.prompt_ids = []
    loop = make_loop(scorer=Serving())
    loop.run(lambda: len(served) >= 2)

    assert set(served) == {Version(0, 0)}
