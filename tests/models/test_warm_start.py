import random

import pytest
import torch

from mrl.config.policy_tables import MakeTable
from mrl.models.architectures import ARCHITECTURES, init_model
from mrl.models.warm_start import FLOOR, Schedule, completion_loss, draw_rows, lr_factor, pad_rows, warm_start

SHAPE = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "tokenizer": "byte_level"}
CPU = torch.device("cpu")


def tiny_model(architecture="qwen3"):
    return init_model(MakeTable(architecture=architecture, **SHAPE), vocab_size=30, eos_id=0, pad_id=1)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_loss_is_the_mean_over_completion_tokens_alone(architecture):
    """Padding, neighbours in the batch and prompt tokens do not count: the loss equals one computed row by row."""
    model = tiny_model(architecture).eval()
    rows = [[([3, 4], [5, 6, 0])], [([7, 8, 9, 10], [11])], [([12], [13, 0]), ([14, 15], [16, 0]), ([17], [0])]]
    terms = []
    for turns in rows:
        row: list[int] = []
        for given, imitated in turns:
            row += given + imitated
            logprobs = torch.log_softmax(model(torch.tensor([row])).logits[0].float(), -1)[-len(imitated) - 1 :]
            terms += [-logprobs[i, token].item() for i, token in enumerate(imitated)]
    loss = completion_loss(model, *pad_rows(rows, CPU))
    assert loss.item() == pytest.approx(sum(terms) / len(terms), abs=1e-5)


def test_warm_start_learns(examples):
    """Forty steps on a trivial task lower the loss by more than half."""
    model, losses = tiny_model(), []

    def encode(example):
        return [([2, 3], [5, 6, 0])]

    warm_start(
        model,
        encode,
        examples,
        Schedule(steps=40, rows=4, peak_lr=1e-2),
        rng=random.Random(0),
        on_step=lambda step, loss: losses.append(loss),
    )
    assert len(losses) == 40
    assert losses[-1] < 0.5 * losses[0]
    assert not model.training


def test_practice_comes_first_and_in_larger_batches(examples):
    """The first half shows practice only; afterwards both kinds are mixed."""
    schedule = Schedule(steps=10, rows=200, peak_lr=1e-3)
    first = draw_rows(examples, 4, schedule, random.Random(0))
    second = draw_rows(examples, 5, schedule, random.Random(0))
    assert len(first) == 300
    assert all(one.turns[0][0].startswith("Practice") for one in first)
    assert len(second) == 200
    assert sum(one.turns[0][0].startswith("Practice") for one in second) == pytest.approx(80, abs=25)


def test_learning_rate_rises_then_falls_to_the_floor():
    """A ramp from near zero, the peak, and FLOOR at the end."""
    factors = [lr_factor(step, 600) for step in range(601)]
    assert factors[0] < 0.05
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert factors[600] == pytest.approx(FLOOR)
    assert all(0 < factor <= 1 for factor in factors)
