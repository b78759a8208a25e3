"""What a step says of itself: where its time went, and how much of the device it used."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mrl.config.policy_tables import MakeTable
from mrl.learner.step_timing import PhaseClock, peak_flops, peak_memory_mib, training_flops
from mrl.models.architectures import init_model
from mrl.sharing.regime import TrainingExample

CPU = torch.device("cpu")


def test_phases_add_up_and_start_anew(monkeypatch):
    """Seconds of every phase, those of none included, since the last look."""
    ticks = iter([1.0, 3.0, 10.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr("mrl.learner.step_timing.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    clock = PhaseClock(CPU)
    for name in ("forward", "backward", "forward"):
        with clock.phase(name):
            pass

    assert clock.take() == {"pack": 0.0, "forward": 3.0, "backward": 4.0, "update": 0.0}
    assert set(clock.take().values()) == {0.0}


def row(prompt: int, answer: int) -> TrainingExample:
    zeros = np.zeros(answer, np.float32)
    ids = np.zeros(prompt, np.int32), np.zeros(answer, np.int32)
    return TrainingExample(*ids, "own", zeros, zeros, None, "p", "me")


@pytest.mark.parametrize("tied", [True, False])
def test_operations_of_a_training_pass_are_counted_layer_by_layer(tiny_model, tied):
    """Two for each weight and token forward, twice that backward; scores and sums of causal attention."""
    rows = [row(5, 4), row(1, 1), row(3, 7)]
    forward = 0
    for tokens, answer in ((8, 4), (1, 1), (9, 7)):
        for _layer in range(2):
            projections = 32 * 4 * 8 + 2 * 32 * 2 * 8 + 4 * 8 * 32 + 3 * 32 * 64
            norms = 2 * 32 + 2 * 8
            forward += 2 * tokens * (projections + norms)
            forward += 2 * 2 * 4 * 8 * tokens**2 / 2  # scores and their sums, half of them causal
        forward += 2 * tokens * 32 + 2 * answer * 64 * 32

    model = tiny_model(tied=tied)
    assert training_flops(model, rows, 8 + 1 + 9) == pytest.approx(3 * forward, rel=1e-9)
    shared = 3 * 2 * 2 * (projections + norms) * 2 + 3 * 2 * 2 * 32
    assert training_flops(model, rows, 8 + 1 + 7) == pytest.approx(3 * forward - shared, rel=1e-9)


def test_rows_of_an_episode_attend_each_to_itself(tiny_model):
    """The squares are of each row's places: 8 in the first, 6 in the one behind."""
    parts = replace(row(5, 11), row_starts=np.array([4], np.int32))
    found = training_flops(tiny_model(), [parts], 14)
    assert training_flops(tiny_model(), [row(5, 11)], 14) - found == 6 * 2 * 4 * 8 * (15**2 - 8**2 - 6**2)


def test_of_experts_those_count_that_a_token_chooses():
    """Two of eight; the rest of the model as ever."""
    recipe = MakeTable(architecture="qwen3_moe", tokenizer="byte_level", hidden_size=32, num_layers=2, num_heads=4)
    model = init_model(recipe, vocab_size=64, eos_id=0, pad_id=0)
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    assert experts == 2 * 8 * 3 * 32 * 32
    of_places = training_flops(model, [row(3, 5)], 1008) - training_flops(model, [row(3, 5)], 8)

    everything = model.num_parameters() - model.get_input_embeddings().weight.numel()
    assert of_places == pytest.approx(6 * 1000 * (everything - experts * 6 / 8), rel=1e-9)


def test_memory_is_measured_and_a_cpu_has_no_known_peak():
    """The process has more than an interpreter and less than the machine."""
    assert 20 < peak_memory_mib(CPU) < 1e6
    assert peak_flops(CPU) is None
