"""What a policy on "cuda" gets when nothing is said of it: one step of it trains."""

import numpy as np
import pytest
import torch

from mrl.config.defaults import by_device
from mrl.config.load import validate
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.models.row_attention import NAMES
from mrl.models.varlen_attention import AMPERE
from mrl.objectives.specs import Clipped, Correction
from mrl.sharing.regime import Component, TrainingExample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
OWN = Component("own", Clipped(0.2, 0.2, correction=Correction("token", "truncate", 0.0, 5.0)), 1.0, "rows", "own")


def rows(count: int = 8) -> list[TrainingExample]:
    """Two prompts, answers of three to ten tokens, one of them better than the others."""
    rng, made = np.random.default_rng(0), []
    for index in range(count):
        prompt = np.arange(2, 7, dtype=np.int32) + index % 2
        answer = rng.integers(2, 60, size=3 + index).astype(np.int32)
        behaviour = np.full(answer.size, -4.0, dtype=np.float32)
        advantage = np.full(answer.size, 1.0 if index == 3 else -0.2, dtype=np.float32)
        made.append(TrainingExample(prompt, answer, "own", advantage, np.ones_like(advantage), behaviour, "p", "a"))
    return made


def test_one_step_trains_with_the_defaults_of_the_device(tiny_model):
    """In bfloat16, with the kernel that was proved, where the GPU has it; the parameters stay float32 and move."""
    tables = {
        "run": {"name": "r", "steps": 1},
        "tasks": {"copy": {"source": "words", "dataset": "copy"}},
        "policies": {"a": {"model": "m", "device": "cuda", "learner": {"lr": 1e-2}}},
    }
    table = by_device(validate(tables, where="test")).config.policies["a"].learner
    world = World(0, 1, torch.device("cuda", 0))
    trainer = Trainer(tiny_model(), table, (OWN,), temperature=1.0, seed=0, total_steps=1, world=world)
    before = [parameter.detach().float().clone() for parameter in trainer.model.parameters()]

    values = trainer.train(StepOrder(rows(), {"own": 8.0}, 1.0), step=0)

    can = torch.cuda.get_device_capability() >= AMPERE
    assert trainer.model.config._attn_implementation == NAMES["varlen" if can else "rows"]
    assert not values["optim/skipped"]
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert any(not torch.equal(old, new.float()) for old, new in zip(before, trainer.model.parameters(), strict=True))
