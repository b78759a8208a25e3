"""A whole worker around an engine under test: the real loop, and a learner's real books at the other end of a link."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.engines.engine import FinishedAnswer, Generation, GenerationRequest
from mrl.learner.intake import Intake
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.metrics.telemetry import Telemetry
from mrl.records.codec import unpack_array
from mrl.records.rollouts import ScoredGroup, WeightsNotice
from mrl.records.version import Version
from mrl.rollout.link import WorkerLink
from mrl.rollout.loop_options import LoopOptions
from mrl.rollout.sampling import Sampler
from mrl.rollout.worker_loop import RolloutLoop
from mrl.tasks.pool import build_pool
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys, load_client_keys
from mrl.transport.server import ServerSocket
from mrl.weights.canary import canary_sequences
from mrl.weights.publish import Publisher
from tests.support.engine_rig import VOCAB_SIZE, Rig, Weights

GROUP_SIZE = 8
WORKER = Grant("worker", "a")


class WorkerRig:
    """A worker of which a learner wants `num_groups` groups, of which at most four are in flight."""

    def __init__(self, rig: Rig, folder: Path, *, run_epoch: int, num_groups: int) -> None:
        self.rig, self._run_epoch, self._num_groups = rig, run_epoch, num_groups
        self._folder, self._step = folder, 0
        self.groups: list[ScoredGroup] = []
        self.published: Counter[str] = Counter()
        """Ticket -> how often its group was published to the peers."""
        self._closing = ExitStack()
        self._pool = build_pool(
            {"trim": TaskTable(source="words", dataset="trim")}, PoolTable(train_prompts=num_groups, held_out_prompts=1)
        )
        self._intake = self._open_learner()
        self.loop = self._make_loop()

    def publish(self, weights: Weights) -> Version:
        """Publish and announce these weights as the next version."""
        self._step += 1
        version = Version(self._run_epoch, self._step)
        self.rig.served[version] = weights
        publisher = Publisher(self._folder / "weights", "a", model_folder=weights.folder)
        path = publisher.publish(weights.model, version, canary_sequences(VOCAB_SIZE))
        self._intake.announce(WeightsNotice(version=version, manifest_path=str(path)))
        return version

    def run(self, script: Callable[[], Iterator[None]]) -> dict[str, int]:
        """Work until the learner has all groups, taking a step of the script at every turn; return what it counted."""
        turns = script()

        def done() -> bool:
            self.groups += self._intake.arrivals()
            next(turns, None)
            return len(self.groups) >= self._num_groups

        self.loop.run(done)
        return self._intake.take_counts()

    def close(self) -> None:
        """End the link and the pool; the engine stays."""
        self._closing.close()

    def as_answers(self) -> tuple[list[GenerationRequest], list[FinishedAnswer]]:
        """Return the groups that came to the learner, as the engine's requests and answers."""
        requests = [
            GenerationRequest(group.ticket, unpack_array(group.prompt_token_ids, "i4"), np.zeros(0, np.uint64))
            for group in self.groups
        ]
        finished = []
        for group in self.groups:
            for index, one in enumerate(group.answers):
                token_ids, logprobs = unpack_array(one.token_ids, "i4"), unpack_array(one.logprobs, "f4")
                generation = Generation(token_ids, logprobs, one.versions, one.finish_reason)
                finished.append(FinishedAnswer(group.ticket, index, generation))
        return requests, finished

    def _open_learner(self) -> Intake:
        keys = create_keys(self._folder / "keys", [WORKER])
        self._server = ServerSocket(keys)
        pace = SamplingLimits(self._num_groups, GROUP_SIZE, max_staleness_versions=0, total_steps=1)
        ledger = WorkLedger(pace, lambda n: self._pool.prompt_at(n).prompt_id, resumed_at=Version(self._run_epoch, 0))
        intake = Intake(self._server, ledger)
        self._closing.callback(intake.close)
        return intake

    def _make_loop(self) -> RolloutLoop:
        link = WorkerLink("worker/a/0")
        own = load_client_keys(self._folder / "keys", WORKER)
        socket = ClientSocket(own, lambda: self._server.address, identity="worker/a/0")
        client = BackgroundClient(socket, on_message=link.on_message, on_tick=link.on_tick)
        self._closing.callback(client.close, 0.2)
        link.open(client.post, client.restart)
        return RolloutLoop(
            Sampler("a", 1, self.rig.engine, self._pool, _token_ids, _text),
            link,
            Telemetry("worker/a/0", "a", lambda record: True),
            LoopOptions(max_answers=lambda in_flight: 4 * GROUP_SIZE, publish=self._publish, max_staleness_versions=9),
            group_size=GROUP_SIZE,
            learner_bound_s=30.0,
        )

    def _publish(self, groups: Sequence[ScoredGroup]) -> None:
        self.published.update(group.ticket for group in groups)


def _token_ids(text: str) -> npt.NDArray[np.int32]:
    """Return a prompt's ids: its first 12 bytes."""
    return np.frombuffer(text.encode()[:12], dtype=np.uint8).astype(np.int32)


def _text(token_ids: npt.NDArray[np.int32]) -> bytes:
    return token_ids.astype(np.uint8).tobytes()
