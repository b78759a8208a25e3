"""A forward in another number format is that of a model whose tensors have it, to the bit."""

import copy

import numpy as np
import pytest
import torch

from mrl.config.policy_tables import LearnerTable
from mrl.learner.ranks.world import World
from mrl.learner.sharding import place
from mrl.models.number_formats import EmulatedPrecision, coarser, rounded
from mrl.models.scoring import score_tokens
from mrl.weights.canary import canary_sequences

TEXTS = canary_sequences(64, num_sequences=6, num_tokens=12)


def in_format(model, number_format: str):
    """A copy all of whose parameters have a number format."""
    changed = copy.deepcopy(model)
    for parameter in changed.parameters():  # a buffer of frequencies stays as it is, as in a model that is loaded
        parameter.data = parameter.data.to(getattr(torch, number_format))
    return changed


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("number_format", ["bfloat16", "float16"])
def test_a_model_computes_as_its_copy_of_that_format(tiny_model, family, number_format):
    """All of it, the residual stream and the logits as well; then it computes as before."""
    model = tiny_model(family)
    before = score_tokens(model, TEXTS)

    with EmulatedPrecision(number_format, weights=number_format):
        found = score_tokens(model, TEXTS)

    assert found == score_tokens(in_format(model, number_format), TEXTS)
    assert found != before
    assert score_tokens(model, TEXTS) == before


def test_weights_may_be_rounded_alone(tiny_model):
    """The arithmetic is that of float32 then."""
    model = tiny_model()
    with EmulatedPrecision("float32", weights="bfloat16"):
        found = score_tokens(model, TEXTS)

    assert found == score_tokens(in_format(in_format(model, "bfloat16"), "float32"), TEXTS)


def test_a_wrapped_model_that_computes_in_16_bits_is_scored_in_float32(tiny_model):
    """With the weights that it gathers, which are rounded."""
    model = tiny_model()
    expected = score_tokens(in_format(in_format(model, "bfloat16"), "float32"), TEXTS)
    wrapped = place(model, LearnerTable(precision="bfloat16"), World(0, 1, torch.device("cpu")))

    with EmulatedPrecision("float32", weights="bfloat16"):
        exact = score_tokens(wrapped, TEXTS)

    np.testing.assert_allclose(exact, expected, atol=1e-5, rtol=0)
    assert np.abs(np.subtract(score_tokens(wrapped, TEXTS), expected)).mean() > 1e-3


def test_tf32_has_ten_bits_after_the_point():
    """Rounded to the nearest, ties to even; float32 lies as far above it as it lies above bfloat16."""
    values = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -3.0e-30, 0.0])

    assert rounded(values, "tf32").tolist() == [
        1.0, 1 + 2**-10, 1.0, 1 + 2**-9, 1 + 2**-10, pytest.approx(-3.0e-30, rel=2**-11), 0.0
    ]  # fmt: skip
    assert [coarser("tf32", "float32"), coarser("bfloat16", "float16")] == ["tf32", "bfloat16"]


def test_products_of_tf32_are_off_by_less_than_those_of_bfloat16(tiny_model):
    """By about its bits."""
    model = tiny_model()
    exact = np.asarray(score_tokens(model, TEXTS))
    off = {}
    for number_format in ("float32", "tf32", "bfloat16"):
        with EmulatedPrecision(number_format, weights=number_format):
            off[number_format] = np.abs(np.asarray(score_tokens(model, TEXTS)) - exact).mean()

    assert off["float32"] == 0.0
    assert 4.0 < off["bfloat16"] / off["tf32"] < 32.0
