"""Replayed routers: told what they would have chosen they change no bit; told otherwise they are a slow twin."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mrl.errors import ModelFolderError
from mrl.models.routing.router_record import RouterRecord
from mrl.models.routing.router_replay import OWN, RouterReplay
from tests.support.mixtures import NUM_EXPERTS, NUM_LAYERS, TOP_K, VOCAB_SIZE, draw_experts, make_mixture

FAMILIES = ["qwen3_moe", "mixtral"]
IDS = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, (1, 17)))


def as_told(experts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(experts.astype(np.int16)).view(len(experts), NUM_LAYERS, TOP_K)


def gradients(model: nn.Module, **told: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states, and what a loss over them gives to every parameter."""
    model.zero_grad()
    hidden = model.get_decoder()(input_ids=IDS, use_cache=False, **told).last_hidden_state
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_bits(one, other) -> bool:
    return torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in other[1])


class SlowBlock(nn.Module):
    """A block of experts that is told where each token goes, token by token; its weights are those of another block."""

    def __init__(self, block: nn.Module, told: torch.Tensor, *, divides: bool) -> None:
        super().__init__()
        self.block, self.told, self.divides = block, told, divides

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, experts, block = [], self.block.experts, self.block
        for token, chosen in zip(hidden[0], self.told.tolist(), strict=True):
            scores = block.gate.weight @ token
            weights = [torch.exp(scores[one]) / torch.exp(scores).sum() for one in chosen]
            total = sum(weights) if self.divides else 1.0
            row = torch.zeros_like(token)
            for one, weight in zip(chosen, weights, strict=True):
                gate, up = (experts.gate_up_proj[one] @ token).chunk(2)
                row = row + weight / total * (experts.down_proj[one] @ (nn.functional.silu(gate) * up))
            rows.append(row)
        return torch.stack(rows)[None]


def slow_twin(model: nn.Module, told: torch.Tensor, *, divides: bool = True) -> nn.Module:
    for index, layer in enumerate(model.get_decoder().layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp = SlowBlock(layer.mlp, told[:, index], divides=divides)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_told_its_own_choice_a_model_changes_no_bit(family):
    """Neither of what it says nor of any gradient."""
    plain, model = make_mixture(family), make_mixture(family)
    record, expected = RouterRecord(plain), gradients(plain)
    replay = RouterReplay(model)

    assert same_bits(gradients(model), expected), "told nothing"
    assert same_bits(gradients(model, chosen_experts=as_told(record.last())), expected)
    told, other = replay.take_counts()
    assert (told, other) == (IDS.numel() * TOP_K * (3 if family == "mixtral" else 2), 0)


@pytest.mark.parametrize(("family", "divides"), [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True)])
def test_told_otherwise_it_is_a_slow_twin(family, divides):
    """Its gates are those of its own router over the experts that it was told, and carry their gradients."""
    config = {} if divides else {"norm_topk_prob": False}
    model, twin = make_mixture(family, **config), make_mixture(family, **config)
    told = as_told(draw_experts(np.random.default_rng(3), IDS.numel()))
    own = gradients(model)
    RouterReplay(model)

    hidden, found = gradients(model, chosen_experts=told)
    expected_hidden, expected = gradients(slow_twin(twin, told, divides=divides))

    torch.testing.assert_close(hidden, expected_hidden, atol=2e-5, rtol=1e-4)
    assert (hidden - own[0]).abs().max() > 0.1, "the experts matter"
    renamed = {name.replace("mlp.block.", "mlp."): gradient for name, gradient in expected.items()}
    assert renamed.keys() == found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, renamed[name], atol=2e-4, rtol=1e-3, msg=name)
    assert same_bits(gradients(model), own), "the next pass is told nothing"


def test_a_place_that_is_told_nothing_chooses_for_itself():
    """Beside others that are told; and what the router would have chosen otherwise is counted."""
    model, plain = make_mixture("mixtral"), make_mixture("mixtral")
    record, replay = RouterRecord(plain), RouterReplay(model)
    seen = RouterRecord(model)
    own_hidden = plain.get_decoder()(input_ids=IDS, use_cache=False).last_hidden_state
    own = as_told(record.last())
    told = own.clone()
    told[:, 1:] = OWN
    told[5, 0] = torch.tensor([one for one in range(NUM_EXPERTS) if one not in own[5, 0].tolist()][:TOP_K])
    told[7, 0] = own[7, 0].flip(0)
    told[9:] = OWN

    hidden = model.get_decoder()(input_ids=IDS, use_cache=False, chosen_experts=told).last_hidden_state

    chosen = as_told(seen.last())
    assert torch.equal(chosen[:9, 0], told[:9, 0])
    assert torch.equal(chosen[9:, 0], own[9:, 0])
    torch.testing.assert_close(hidden[0, :5], own_hidden[0, :5], atol=1e-5, rtol=0)
    assert replay.take_counts() == (9 * TOP_K, TOP_K)
    assert replay.take_counts() == (0, 0)


def test_a_pass_without_gradient_counts_nothing():
    """The one at the start of a step would count its tokens twice."""
    model = make_mixture()
    replay = RouterReplay(model)
    told = as_told(draw_experts(np.random.default_rng(3), IDS.numel()))

    with torch.no_grad():
        model.get_decoder()(input_ids=IDS, use_cache=False, chosen_experts=told)

    assert replay.take_counts() == (0, 0)


def test_layers_that_run_again_in_the_backward_pass_are_told_again():
    """Though the model has had another pass in between, which was told nothing."""
    plain, model = make_mixture(), make_mixture()
    told = as_told(draw_experts(np.random.default_rng(3), IDS.numel()))
    RouterReplay(plain)
    RouterReplay(model)
    for layer in model.get_decoder().layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    expected = gradients(plain, chosen_experts=told)
    hidden = model.get_decoder()(input_ids=IDS, use_cache=False, chosen_experts=told).last_hidden_state
    with torch.no_grad():
        model.get_decoder()(input_ids=IDS, use_cache=False)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()

    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert same_bits((hidden.detach(), found), expected)


def test_the_record_is_of_the_own_thread_alone():
    """Another thread may score with the model meanwhile."""
    model = make_mixture()
    record = RouterRecord(model)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        model.get_decoder()(input_ids=IDS, use_cache=False)
        before = record.last()
        pool.submit(lambda: model.get_decoder()(input_ids=IDS[:, :3], use_cache=False)).result()

    assert before.shape == (IDS.numel(), NUM_LAYERS * TOP_K)
    np.testing.assert_array_equal(record.last(), before)
    assert not before[:, TOP_K : 2 * TOP_K].any(), "of the dense layer"


@pytest.mark.parametrize("kind", [RouterReplay, RouterRecord])
def test_a_model_without_known_routers_is_refused(tiny_model, kind):
    """In one line."""
    with pytest.raises(
        ModelFolderError, match=r"router_replay: this model type is not supported; got 'qwen3'; wanted .*qwen3_moe"
    ):
        kind(tiny_model("qwen3"))


def test_what_fits_is_of_the_models_shape_and_experts():
    """Ids beyond the last expert would be read out of nowhere; no router chooses one twice."""
    shape = RouterReplay(make_mixture()).shape

    fitting = draw_experts(np.random.default_rng(0), 4)
    assert shape.fits(fitting, 4)
    assert not shape.fits(fitting, 3)
    assert not shape.fits(fitting[:, 1:], 4)
    for layer, fits in ((0, False), (1, True), (2, False)):
        twice, beyond = fitting.copy(), fitting.copy()
        twice[3, layer * TOP_K : (layer + 1) * TOP_K] = 0
        beyond[3, layer * TOP_K] = NUM_EXPERTS
        assert shape.fits(twice, 4) is fits, "nothing counts of the dense layer"
        assert not shape.fits(beyond, 4)
