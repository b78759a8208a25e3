"""What a learner that is told to end saves: its last step, unless all policies go on from a common one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.learner.ranks.learner_turn import LearnerTurn
from mrl.learner.ranks.world import World
from mrl.learner.references import CanaryReferences
from mrl.learner.training_loop import Learner, Milestones
from mrl.models.row_attention import use_row_attention
from mrl.records.version import Version
from mrl.weights.publish import Publisher


class Saved:
    """In place of the saver: the steps that were saved."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.waits = 0

    def save(self, step: int, tensors: Any, state: Any) -> None:
        assert tensors
        self.steps.append(step)

    def wait(self) -> None:
        self.waits += 1


class Stopped(Learner):
    """Ends after some steps, as when SIGTERM came while it waited for groups."""

    steps_left = 0

    def _step(self, stopping: Any) -> bool:
        if not self.steps_left:
            return False
        self.steps_left -= 1
        self._version = Version(self._version.run_epoch, self._version.step + 1)
        self._save_when_due()
        return True


@pytest.mark.parametrize(
    ("steps", "save_when_stopped", "saved"), [(3, True, [2, 3]), (2, True, [2]), (0, True, []), (3, False, [2])]
)
def test_the_last_step_is_saved_once(
    tiny_model, tmp_path: Path, steps: int, save_when_stopped: bool, saved: list[int]
) -> None:
    """Not again when it was due anyway, not where this life has trained nothing, not where steps are common."""
    model = tiny_model()
    use_row_attention(model)
    optimizer, alone = torch.optim.AdamW(model.parameters()), World(0, 1, torch.device("cpu"))
    trainer = SimpleNamespace(
        model=model, precision="float32", kernel="chunked", context=None, optimizer=optimizer, world=alone
    )
    milestones = Milestones(10, 2, save_when_stopped=save_when_stopped)
    saver = Saved()
    canary = CanaryReferences(trainer, [[3, 5, 9, 2, 7]])  # type: ignore[arg-type]
    publisher = Publisher(tmp_path, "qwen")
    learner = Stopped(
        trainer,  # type: ignore[arg-type]
        milestones,
        Version(1, 0),
        None,
        saver,  # type: ignore[arg-type]
        seed=1,
        canary=canary,
        publisher=publisher,
        turn=LearnerTurn(alone, None),  # type: ignore[arg-type]
    )
    learner.steps_left = steps

    assert not learner.run(lambda: True)
    assert saver.steps == saved
    assert saver.waits == 1
