"""One step gives the gradient of the written formula, however the batch is split."""

import copy
import math
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mrl.config.schema import LearnerTable
from mrl.errors import ModelFolderError
from mrl.learner.order import StepOrder, decode_order, encode_order, split_minibatches
from mrl.learner.trainer import Trainer, check_head, learning_rate
from mrl.learner.world import World
from mrl.sharing.regime import Component
from mrl.weights.canary import canary_sequences

COMPONENTS = (Component("own", "policy_gradient", 1.0, "rows"), Component("rescue", "imitation", 0.3, "rows"))


def table(**changes: object) -> LearnerTable:
    return LearnerTable.model_validate({"lr": 1e-2, "pack_tokens": 48, "microbatch_tokens": 96} | changes)


def alone() -> World:
    return World(0, 1, torch.device("cpu"))


def trainer(model: torch.nn.Module, settings: LearnerTable, world: World | None = None) -> Trainer:
    return Trainer(model, settings, COMPONENTS, temperature=0.8, seed=0, total_steps=100, world=world or alone())


def order(rows) -> StepOrder:
    own = [row for row in rows if row.component == "own"]
    return StepOrder(rows, {"own": float(len(own) + 5), "rescue": float(max(1, len(rows) - len(own)))})


def slow_loss(model: torch.nn.Module, step: StepOrder, cap: float = 5.0) -> torch.Tensor:
    """The loss as written: one row and one token at a time, pi_prox being the model itself."""
    total = torch.zeros(())
    for row in step.examples:
        ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.answer_token_ids]).astype(np.int64))
        logprobs = (model(ids[None]).logits[0] / 0.8).log_softmax(-1)
        start, length = row.prompt_token_ids.size, row.answer_token_ids.size
        for t in range(length):
            logp = logprobs[start + t - 1, ids[start + t]]
            if row.component == "rescue":
                total = total - 0.3 / step.denominators["rescue"] * logp / length
                continue
            ratio = torch.exp(logp - logp.detach())
            clipped = ratio.clamp(0.8, 1.2)
            weight = min(math.exp(float(logp.detach()) - float(row.behaviour_logprobs[t])), cap)
            advantage = float(row.advantages[t])
            term = weight * torch.minimum(ratio * advantage, clipped * advantage)
            total = total - term / length / step.denominators["own"]
    return total


@pytest.mark.parametrize("microbatch_tokens", [48, 96, 10_000])
def test_the_gradient_equals_the_written_formula_for_any_microbatch(tiny_model, make_rows, microbatch_tokens):
    """GRPO with decoupled weights plus imitation, summed over components with their own denominators."""
    step, reference = order(make_rows(21)), tiny_model()
    loss = slow_loss(reference, step)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    model = tiny_model()

    settings = table(microbatch_tokens=microbatch_tokens, lr=1e-30, max_grad_norm=1e9)
    values = trainer(model, settings).train(step, 0)

    actual = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(actual, expected, atol=1e-5)
    assert values["loss/total"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert values["optim/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)


def _rank(rank: int, size: int, store: str, rows, settings: LearnerTable, model: torch.nn.Module, out: str) -> None:
    torch.set_num_threads(1)
    if size > 1:
        options = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **options)
    world = World(rank, size, torch.device("cpu"))
    # Spawned processes share the memory of the tensors that they are given.
    model = copy.deepcopy(model)
    learner = trainer(model, settings, world)
    for step in range(len(rows)):
        sent = world.broadcast_bytes(encode_order(order(rows[step])) if rank == 0 else None)
        learner.train(decode_order(sent), step)
    torch.save([p.detach() for p in model.parameters()], f"{out}.{rank}")
    world.close()


def _parameters(path: str) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in torch.load(path, weights_only=True)])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_two_ranks_train_the_parameters_that_one_trains(tiny_model, make_rows, tmp_path: Path, minibatches):
    """On gloo ranks parameters agree with one process to 1e-5 and between ranks exactly, also after an empty step."""
    rows = [make_rows(20, seed=0), make_rows(20, seed=1), [], make_rows(20, seed=2)]
    settings = table(minibatches=minibatches)
    single = str(tmp_path / "single")
    _rank(0, 1, "", rows, settings, tiny_model(), single)

    pair = str(tmp_path / "pair")
    mp.spawn(_rank, args=(2, str(tmp_path / "store"), rows, settings, tiny_model(), pair), nprocs=2)

    assert torch.equal(_parameters(pair + ".0"), _parameters(pair + ".1"))
    assert torch.allclose(_parameters(single + ".0"), _parameters(pair + ".0"), atol=1e-5)
    assert not torch.allclose(_parameters(single + ".0"), torch.cat([p.flatten() for p in tiny_model().parameters()]))


def test_rows_without_advantage_change_nothing(tiny_model, make_rows):
    """A batch of zero advantages and no rescues leaves every gradient at exactly zero."""
    rows = [row for row in make_rows(8) if row.component == "own"]
    for row in rows:
        row.advantages[:] = 0.0
    model = tiny_model()

    trainer(model, table()).train(StepOrder(rows, {"own": 8.0, "rescue": 1.0}), 0)

    assert all(not p.grad.any() for p in model.parameters())


def test_an_empty_step_is_a_step(tiny_model):
    """When every group is uniform there is nothing to train, and the parameters stay."""
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]

    values = trainer(model, table()).train(StepOrder([], {"own": 8.0, "rescue": 1.0}), 0)

    assert values["loss/total"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_skips_the_update(tiny_model, make_rows):
    """Parameters survive a batch with a NaN in it, and the step says that it was skipped."""
    rows = [row for row in make_rows(4) if row.component == "own"]
    rows[0].advantages[:] = np.nan
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]

    values = trainer(model, table()).train(StepOrder(rows, {"own": 4.0, "rescue": 1.0}), 0)

    assert values["optim/skipped"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_order_crosses_ranks_unchanged(make_rows):
    """Rows, denominators and absent behaviour survive the broadcast."""
    sent = order(make_rows(9))

    received = decode_order(encode_order(sent))

    assert received.denominators == sent.denominators
    for a, b in zip(sent.examples, received.examples, strict=True):
        assert np.array_equal(a.answer_token_ids, b.answer_token_ids)
        assert np.array_equal(a.weights, b.weights)
        assert (a.behaviour_logprobs is None) == (b.behaviour_logprobs is None)
        assert (a.component, a.prompt_id, a.source) == (b.component, b.prompt_id, b.source)


def test_minibatches_hold_every_row_once_and_share_the_denominators(make_rows):
    """Dealing rows into minibatches keeps all of them, phases in order."""
    step = order(make_rows(11))

    parts = split_minibatches(step, 3, np.random.default_rng(0))

    names = [row.prompt_id for part in parts for row in part.examples]
    assert sorted(names) == sorted(row.prompt_id for row in step.examples)
    assert names != [row.prompt_id for row in step.examples]
    assert sum(part.denominators["own"] for part in parts) == pytest.approx(step.denominators["own"])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_training_scores_what_the_model_scores(tiny_model, family):
    """The head is checked at start; one that is more than a matrix is refused."""
    model, ids = tiny_model(family), canary_sequences(64, num_tokens=8)
    check_head(model, ids)

    model.register_forward_hook(lambda _module, _inputs, output: setattr(output, "logits", 2 * output.logits))
    with pytest.raises(ModelFolderError, match="more than a matrix"):
        check_head(model, ids)


def test_the_learning_rate_falls_in_a_straight_line():
    """From the first step to the last, and it reaches the optimizer."""
    rates = [learning_rate(2.0, 0.25, step, 5) for step in (0, 2, 4, 9)]

    assert rates == [2.0, 1.25, 0.5, 0.5]
    assert learning_rate(2.0, 0.25, 0, 1) == 2.0


def test_the_update_uses_the_learning_rate_of_its_step(tiny_model, make_rows):
    """AdamW's first update moves a parameter by about the learning rate of the step."""
    moved = []
    for step in (0, 99):
        model = tiny_model()
        before = model.lm_head.weight.detach().clone()
        values = trainer(model, table(lr_final_share=0.1)).train(order(make_rows(8)), step)
        moved.append(float((model.lm_head.weight.detach() - before).abs().max()))
        assert values["optim/lr"] == pytest.approx(0.01 if step == 0 else 0.001)

    assert moved[0] == pytest.approx(10 * moved[1], rel=0.05)
