"""Where a step's time is told: moves to a device that others have too are neither training nor saving."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.learner import training_loop as loop
from mrl.learner.ranks import learner_turn
from mrl.learner.ranks.learner_turn import LearnerTurn
from mrl.learner.ranks.world import World
from mrl.learner.references import CanaryReferences
from mrl.learner.training_loop import Learner, Milestones
from mrl.metrics.telemetry import Telemetry
from mrl.models.row_attention import use_row_attention
from mrl.records.version import Version


class Timed(Learner):
    """Each part takes its own time; what is told of it is kept."""

    now_s = 0.0

    def take(self, seconds: float) -> None:
        Timed.now_s += seconds

    def _prepare(self, stopping: Any) -> Any:
        self.take(1.0)
        return SimpleNamespace(order=None)

    def _encode(self, prepared: Any) -> bytes:
        return b"here"

    def _check_skipped(self, values: Any, order: Any) -> None:
        pass

    def _publish(self, *, resumed: bool) -> None:
        self.take(100.0)

    def _save_when_due(self) -> None:
        self.take(1000.0)

    def _report(self, first: Any, prepared: Any, values: dict[str, float], *, busy_s: float) -> None:
        self.told = values | {"busy_s": busy_s}


def test_moves_are_neither_training_nor_saving(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(Timed, "now_s", 0.0)
    clock = SimpleNamespace(monotonic=lambda: Timed.now_s)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(learner_turn, "time", clock)
    model, alone = tiny_model(), World(0, 1, torch.device("cpu"))
    use_row_attention(model)
    turn = LearnerTurn(alone, Telemetry("learner/a", "a", lambda record: None), shares=True)

    def train(order: Any, step: int) -> dict[str, float]:
        learner.take(10.0)
        return {"tokens/trained": 10.0}

    trainer = SimpleNamespace(
        model=model,
        precision="float32",
        kernel="chunked",
        context=None,
        world=alone,
        train=train,
        take_measurements=lambda order: {},
    )
    canary = CanaryReferences(trainer, [[3, 5, 9, 2, 7]])  # type: ignore[arg-type]
    monkeypatch.setattr(canary, "before_step", lambda order: None)
    first, publisher = SimpleNamespace(), SimpleNamespace()
    learner = Timed(
        trainer,  # type: ignore[arg-type]
        Milestones(10, 0),
        Version(0, 0),
        first,  # type: ignore[arg-type]
        None,
        seed=1,
        canary=canary,
        publisher=publisher,  # type: ignore[arg-type]
        turn=turn,
    )
    moves = SimpleNamespace(come_to_device=lambda: learner.take(0.25), leave_device=lambda: learner.take(0.5))
    turn.has(moves, None)

    for _ in range(2):
        assert learner._step(lambda: False)

        told = learner.told
        assert told["time/move_s"] == pytest.approx(0.75)
        assert told["time/train_s"] == pytest.approx(10.0)
        assert told["time/checkpoint_s"] == pytest.approx(1000.0)
        assert told["busy_s"] == pytest.approx(1110.0)
        assert told["time/step_s"] == pytest.approx(1111.75)
