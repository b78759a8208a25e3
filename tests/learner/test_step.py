"""One step gives the gradient of the written formula, however the batch is split."""

import copy
import math
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from structlog.testing import capture_logs

from mrl.alignment.next_units import NextUnits
from mrl.config.policy_tables import LearnerTable
from mrl.errors import ConfigError, ModelFolderError
from mrl.learner.loss import component_losses
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder, decode_order, encode_order, split_minibatches
from mrl.learner.trainer import Trainer, agreed_kernel, check_forward, learning_rate
from mrl.models.row_attention import NAMES, use_row_attention
from mrl.objectives.specs import (
    Cispo,
    Clipped,
    Correction,
    CrossSequence,
    Distilled,
    Dppo,
    Filtered,
    Grafted,
    Imitation,
    Regularizer,
    Shaped,
    Trrd,
)
from mrl.sharing.regime import Component
from mrl.weights.canary import canary_sequences
from tests.learner.test_packing import with_given_tokens, with_later_rows

GRPO = Component("own", Clipped(0.2, 0.2, correction=Correction("token", "truncate", 0.0, 5.0)), 1.0, "rows", "own")
RESCUE = Component("rescue", Imitation(), 0.3, "rows", "peer")
COMPONENTS = (GRPO, RESCUE)
MANY = (
    Component("own", Trrd(correction=Correction()), 1.0, "rows", "own", Regularizer(0.05, "k3", 0.02)),
    RESCUE,
    Component("shared", CrossSequence(lower=0.01, lower_step=0.0, alpha=1.0), 0.7, "rows", "peer"),
    Component("pooled", Clipped(base="behaviour", dual_clip=3.0), 0.5, "rows", "peer"),
)
"""Terms of tokens and of whole rows, peers' log-probs of spans, teachers, a divergence and an entropy bonus."""

SEQUENCE = Clipped(0.3, 0.3, ratio="sequence", correction=Correction("sequence", "truncate", 0.0, 5.0))
OWN_TERMS = {
    "gspo": SEQUENCE,
    "cispo": Cispo(correction=Correction()),
    "dppo": Dppo(),
    "grafted": Grafted(Clipped(ratio="sequence"), floor=0.1),
    "luffy": Shaped(),
    "filtered": Filtered(Clipped(base="behaviour", dual_clip=3.0), 0.3),
}
TURNS = [
    pytest.param(list, id="one turn"),
    pytest.param(with_given_tokens, id="turns"),
    pytest.param(with_later_rows, id="turns in several rows"),
]
"""Rows as answers of one turn, and as episodes: given tokens between sampled ones, some behind a rewritten prompt."""
DENOMINATORS: tuple[Literal["tokens", "rows", "prompts", "constant"], ...] = ("tokens", "rows", "prompts", "constant")


def with_own_term(name: str) -> tuple[Component, Component]:
    """A term of each family beside a rescue, and every kind of denominator over the terms."""
    kind = DENOMINATORS[list(OWN_TERMS).index(name) % len(DENOMINATORS)]
    return Component("own", OWN_TERMS[name], 1.0, kind, "own"), RESCUE


def table(**changes: object) -> LearnerTable:
    return LearnerTable.model_validate({"lr": 1e-2, "microbatch_tokens": 96} | changes)


def alone() -> World:
    return World(0, 1, torch.device("cpu"))


def trainer(model, settings, *, components=COMPONENTS, world=None, reference=None) -> Trainer:
    return Trainer(
        model,
        settings,
        components,
        temperature=0.8,
        seed=0,
        total_steps=100,
        world=world or alone(),
        reference=reference,
    )


def order(rows, expansion: float = 1.0) -> StepOrder:
    count = {name: sum(row.component == name for row in rows) for name in ("own", "rescue", "shared", "pooled")}
    return StepOrder(
        rows,
        {
            "own": float(count["own"] + 5),
            "rescue": float(max(1, count["rescue"])),
            "shared": float(count["shared"] + 2),
            "pooled": float(count["pooled"] + 1),
        },
        expansion,
    )


def slow_rows(model, rows):
    """Row by row, plain forwards over each alone: the row, [T, V] log-probs, [T] those of its sampled tokens."""
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.answer_token_ids]).astype(np.int64))
        size = row.prompt_token_ids.size
        bounds = [0, *([] if row.row_starts is None else (row.row_starts + size).tolist()), ids.numel()]
        table_TV = torch.cat([model(ids[None, start:end]).logits[0] for start, end in pairwise(bounds)])
        table_TV = (table_TV / 0.8).log_softmax(-1)[size - 1 : -1]
        logp_T = table_TV.gather(-1, ids[size:, None]).squeeze(-1)
        is_sampled = slice(None) if row.is_trained is None else torch.from_numpy(row.is_trained)
        yield row, table_TV[is_sampled], logp_T[is_sampled]


def slow_clipped(ratio, advantage):
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def slow_spread(told, spans, logp_T):
    """[T] another policy's log-probs of spans, divided over their tokens as the policy's own are."""
    if told is None or spans is None:
        return told
    own = logp_T.tolist()
    total = [sum(o for o, s in zip(own, spans, strict=True) if s == span) for span in spans]
    return [float(told[t]) * own[t] / total[t] for t in range(len(own))]


def slow_behaviour_weight(start, behaviour):
    return min(math.exp(start.item() - float(behaviour)), 5.0)


def slow_loss(model, step: StepOrder, start=None) -> torch.Tensor:
    """GRPO with decoupled weights and SGT's rescues as written, one token at a time; `start` is the first model."""
    total = torch.zeros(())
    for (row, _, logp_T), (_, _, start_T) in zip(
        slow_rows(model, step.examples), slow_rows(start or model, step.examples), strict=True
    ):
        for t, logp in enumerate(logp_T):
            if row.component == "rescue":
                total = total - 0.3 / step.denominators["rescue"] * logp * float(row.weights[t])
                continue
            weight = slow_behaviour_weight(start_T[t], row.behaviour_logprobs[t])
            term = slow_clipped(torch.exp(logp - start_T[t].detach()), float(row.advantages[t]))
            total = total + weight * term * float(row.weights[t]) / step.denominators["own"]
    return total


def slow_loss_of_many(model, step: StepOrder, reference) -> torch.Tensor:
    """RLAD's ratio with KL and entropy, rows of HACPO, PRP and SGT as written, at the start of a step."""
    total = torch.zeros(())
    for (row, table_TV, logp_T), (_, _, ref_T) in zip(
        slow_rows(model, step.examples), slow_rows(reference, step.examples), strict=True
    ):
        each = float(row.weights[0])
        if row.component == "rescue":
            total = total - 0.3 / step.denominators["rescue"] * logp_T.sum() * each
        elif row.component == "shared":
            s = torch.exp((logp_T - torch.tensor(row.behaviour_logprobs)).mean()).clamp(0.01, 1.0)
            total = total - 0.7 / step.denominators["shared"] * s * s.detach() * float(row.advantages[0])
        elif row.component == "pooled":
            for logp, told in zip(
                logp_T, slow_spread(row.behaviour_logprobs, row.behaviour_spans, logp_T), strict=True
            ):
                advantage = float(row.advantages[0])
                term = slow_clipped(torch.exp(logp - told), advantage)
                if advantage < 0:
                    term = term.clamp(max=-3 * advantage)
                total = total + 0.5 * term * each / step.denominators["pooled"]
        else:
            teacher = slow_spread(row.teacher_logprobs, row.teacher_spans, logp_T)
            for t, logp in enumerate(logp_T):
                log_ratio = logp - logp.detach()
                if teacher is not None and not math.isnan(teacher[t]):
                    log_ratio = 0.5 * log_ratio + 0.5 * (logp - float(teacher[t])).clamp(-1.0, 1.0)
                term = slow_clipped(torch.exp(log_ratio), float(row.advantages[t]))
                weight = slow_behaviour_weight(logp, row.behaviour_logprobs[t])
                d = ref_T[t].detach() - logp
                entropy = -(table_TV[t].exp() * table_TV[t]).sum()
                token = weight * term + 0.05 * (d.exp() - d - 1).clamp(-10, 10) - 0.02 * entropy
                total = total + token * each / step.denominators["own"]
    return total


def gradient_of(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def check_gradient(model, values, expected: torch.Tensor, loss: torch.Tensor) -> None:
    torch.testing.assert_close(gradient_of(model), expected, rtol=1e-4, atol=1e-5)
    assert values["loss/total"] == pytest.approx(float(loss.detach()), abs=2e-5)
    assert values["optim/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)


@pytest.mark.parametrize("rows_of", TURNS)
@pytest.mark.parametrize("microbatch_tokens", [48, 96, 10_000])
def test_the_gradient_equals_the_written_formula_for_any_microbatch(tiny_model, make_rows, microbatch_tokens, rows_of):
    """GRPO with decoupled weights plus imitation, summed over components with their own denominators."""
    step, written = order(rows_of(make_rows(21))), tiny_model()
    loss = slow_loss(written, step)
    loss.backward()
    model = tiny_model()

    settings = table(microbatch_tokens=microbatch_tokens, lr=1e-30, max_grad_norm=1e9)
    values = trainer(model, settings).train(step, 0)

    check_gradient(model, values, gradient_of(written), loss)


@pytest.mark.parametrize("rows_of", TURNS)
@pytest.mark.parametrize("microbatch_tokens", [48, 10_000])
def test_many_components_give_the_gradient_of_their_sum(tiny_model, make_rows, microbatch_tokens, rows_of):
    """Terms of rows and of tokens, teachers, reference and entropy; the reference itself stays as it is."""
    step, written, reference = order(rows_of(make_rows(21, shared=True))), tiny_model(), tiny_model(seed=1)
    loss = slow_loss_of_many(written, step, reference)
    loss.backward()
    model, frozen = tiny_model(), tiny_model(seed=1)

    settings = table(microbatch_tokens=microbatch_tokens, lr=1e-30, max_grad_norm=1e9)
    values = trainer(model, settings, components=MANY, reference=frozen).train(step, 0)

    check_gradient(model, values, gradient_of(written), loss)
    assert all(p.grad is None for p in frozen.parameters())


@pytest.mark.parametrize("rows_of", TURNS)
@pytest.mark.parametrize("microbatch_tokens", [48, 10_000])
def test_units_that_a_teacher_tells_give_the_gradient_of_the_divergence(
    tiny_model, make_rows, microbatch_tokens, rows_of
):
    """SimCT's comparison (arXiv 2605.07711) at tokens with units, of rows with one unit or three; the rest is GRPO."""
    rng = np.random.default_rng(4)

    def told(row, index):
        if row.component != "own" or index % 3 == 2:
            return row
        size, most = row.num_trained_tokens, (1, 3)[index % 3]
        ids = np.stack([rng.permutation(64)[:most] for _ in range(size)]).astype(np.int32)
        logprobs = np.log(rng.dirichlet(np.ones(4), size)[:, :most]).astype(np.float32)
        logprobs[rng.random(size) < 0.3] = np.nan
        return replace(row, teacher_units=NextUnits(ids, logprobs))

    step = order([told(row, index) for index, row in enumerate(rows_of(make_rows(21)))])
    written = tiny_model()
    loss, num_told = torch.zeros(()), 0
    for row, table_TV, logp_T in slow_rows(written, step.examples):
        for t, logp in enumerate(logp_T):
            if row.component == "rescue":
                loss = loss - 0.3 / step.denominators["rescue"] * logp * float(row.weights[t])
                continue
            units = row.teacher_units
            if units is not None and np.isfinite(units.logprobs[t]).any():
                p = [*table_TV[t, units.token_ids[t].tolist()].exp()]
                q = np.exp(units.logprobs[t].astype(np.float64)).tolist()
                events = [*zip(p, q, strict=True), (1 - sum(p), 1 - sum(q))]
                term = 0.7 * sum(a * max(-1.5, min(1.5, math.log(a.item() / b))) for a, b in events)
                num_told += 1
            else:
                weight = slow_behaviour_weight(logp, row.behaviour_logprobs[t])
                term = weight * slow_clipped(torch.exp(logp - logp.detach()), float(row.advantages[t]))
            loss = loss + term * float(row.weights[t]) / step.denominators["own"]
    loss.backward()
    assert num_told > 20

    own = Component("own", Distilled(Clipped(correction=Correction()), 0.7, 1.5), 1.0, "rows", "own")
    model, settings = tiny_model(), table(microbatch_tokens=microbatch_tokens, lr=1e-30, max_grad_norm=1e9)
    values = trainer(model, settings, components=(own, RESCUE)).train(step, 0)

    check_gradient(model, values, gradient_of(written), loss)


@pytest.mark.parametrize("name", OWN_TERMS)
def test_the_gradient_of_every_term_does_not_depend_on_the_microbatch(tiny_model, make_rows, name):
    """One row per pass, some, or all at once: the objectives whose formulas their own tests write out."""
    gradients, losses = [], []
    for microbatch_tokens in (48, 96, 10_000):
        model = tiny_model()
        settings = table(microbatch_tokens=microbatch_tokens, lr=1e-30, max_grad_norm=1e9)
        values = trainer(model, settings, components=with_own_term(name)).train(order(make_rows(21)), 0)
        gradients.append(gradient_of(model))
        losses.append(values["loss/total"])

    alone = tiny_model()
    rescues = order([row for row in make_rows(21) if row.component == "rescue"])
    trainer(alone, table(lr=1e-30, max_grad_norm=1e9), components=with_own_term(name)).train(rescues, 0)
    assert not torch.allclose(gradients[0], gradient_of(alone), rtol=1e-2)
    for gradient, loss in zip(gradients[1:], losses[1:], strict=True):
        assert (gradient - gradients[0]).norm() < 1e-5 * gradients[0].norm()
        assert loss == pytest.approx(losses[0], rel=1e-4, abs=1e-6)


def _rank(rank: int, size: int, store: str, cases, model, reference, out: str) -> None:
    """Train every case from the same model, and save what came of it."""
    torch.set_num_threads(1)
    if size > 1:
        options = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **options)
    world = World(rank, size, torch.device("cpu"))
    for name, (settings, components, steps) in cases.items():
        # Spawned processes share the memory of the tensors that they are given.
        own, frozen = copy.deepcopy(model), copy.deepcopy(reference)
        learner = trainer(own, settings, components=components, world=world, reference=frozen)
        check_forward(own, canary_sequences(64, num_tokens=8), context=learner.context)
        values = []
        for number, step in enumerate(steps):
            sent = world.broadcast_bytes(encode_order(step) if rank == 0 else None)
            values.append(learner.train(decode_order(sent), number))
        torch.save({"parameters": [p.detach() for p in own.parameters()], "values": values}, f"{out}.{name}.{rank}")
    world.close()


def _saved(path: str) -> tuple[torch.Tensor, list[dict[str, float]]]:
    found = torch.load(path, weights_only=True)
    return torch.cat([tensor.flatten() for tensor in found["parameters"]]), found["values"]


@pytest.mark.system
@pytest.mark.parametrize("context_parallel", [1, 2], ids=["passes of their own", "places of one pass"])
def test_two_ranks_train_what_one_trains(tiny_model, make_rows, tmp_path: Path, monkeypatch, context_parallel):
    """On gloo ranks parameters and metrics agree with one process, and exactly between ranks; an empty step included.

    With rescues in one minibatch, in four with terms of tokens and of rows, teachers, reference and entropy, and with
    every other term.
    """
    plain = [order(rows) for rows in (make_rows(20), make_rows(20, seed=1), [], make_rows(20, seed=2))]
    many = [order(make_rows(20, seed=seed, shared=True), expansion=2.0) for seed in range(2)]
    cases = {"plain": (table(lr=3e-3), COMPONENTS, plain), "many": (table(lr=3e-3, minibatches=2), MANY, many)}
    cases |= {name: (table(lr=3e-3, minibatches=2), with_own_term(name), plain[:2]) for name in OWN_TERMS}
    models = (tiny_model(), tiny_model(seed=1))
    single, pair = str(tmp_path / "single"), str(tmp_path / "pair")
    _rank(0, 1, "", cases, *models, single)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # the ranks import this very module
    layout = {"context_parallel": context_parallel}
    of_ranks = {name: (settings.model_copy(update=layout), *rest) for name, (settings, *rest) in cases.items()}

    mp.spawn(_rank, args=(2, str(tmp_path / "store"), of_ranks, *models, pair), nprocs=2)

    for name in cases:
        one, one_values = _saved(f"{single}.{name}.0")
        (first, first_values), (second, second_values) = (_saved(f"{pair}.{name}.{rank}") for rank in (0, 1))
        assert torch.equal(first, second)
        assert first_values == second_values
        torch.testing.assert_close(first, one, rtol=0, atol=1e-5)
        assert not torch.allclose(one, torch.cat([p.flatten() for p in tiny_model().parameters()]))
        for found, expected in zip(first_values, one_values, strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_later_update_is_held_to_the_start_of_the_step(tiny_model, make_rows):
    """pi_prox of the second minibatch is the model before the first update, and the weight is taken from it too."""
    step, settings = order(make_rows(16)), table(minibatches=2, max_grad_norm=1e9)
    first, second = split_minibatches(step, 2, np.random.default_rng([0, 0]))
    between = tiny_model()
    trainer(between, table(max_grad_norm=1e9)).train(first, 0)
    loss = slow_loss(between, second, start=tiny_model())
    between.zero_grad()
    loss.backward()
    model = tiny_model()

    trainer(model, settings).train(step, 0)

    torch.testing.assert_close(gradient_of(model), gradient_of(between), rtol=1e-3, atol=1e-4)


def test_the_terms_are_told_how_many_updates_came_before(tiny_model, make_rows):
    """HACPO's bound rises with every minibatch of a step."""
    rows = [row for row in make_rows(24, shared=True) if row.component == "shared"]
    model, step = tiny_model(), StepOrder(rows, {"own": 1.0, "rescue": 1.0, "shared": 6.0})
    term = CrossSequence(lower=0.1, lower_step=0.4, alpha=0.0)
    components = (GRPO, RESCUE, Component("shared", term, 1.0, "rows", "peer"))
    expected = 0.0
    parts = split_minibatches(step, 3, np.random.default_rng([0, 0]))
    for lower, part in zip((0.1, 0.5, 0.9), parts, strict=True):
        for row, _, logp_T in slow_rows(model, part.examples):
            s = math.exp(float((logp_T.detach() + 4.0).mean()))
            expected -= max(lower, min(1.0, s)) * float(row.advantages[0]) / 6.0

    values = trainer(model, table(minibatches=3, lr=1e-30), components=components).train(step, 0)

    assert values["loss/shared"] == pytest.approx(expected, abs=1e-5)


def test_the_step_says_how_far_the_policy_is(tiny_model, make_rows):
    """Divergence from the reference, entropy and clipped share are means over own tokens alone."""
    rows, model, reference = make_rows(21, shared=True), tiny_model(), tiny_model(seed=1)
    tokens = []
    for (row, table_TV, logp_T), (_, _, ref_T) in zip(slow_rows(model, rows), slow_rows(reference, rows), strict=True):
        if row.component == "own":
            d_T = (ref_T - logp_T).detach()
            tokens += torch.stack([d_T.exp() - d_T - 1, -(table_TV.exp() * table_TV).sum(-1).detach()], -1).tolist()
    kl, entropy = np.mean(tokens, axis=0)

    values = trainer(model, table(lr=1e-30), components=MANY, reference=reference).train(order(rows), 0)
    plain = trainer(tiny_model(), table(lr=1e-30)).train(order(make_rows(21)), 0)

    assert values["kl/reference_nats"] == pytest.approx(kl, rel=1e-4)
    assert values["entropy/policy_nats"] == pytest.approx(entropy, rel=1e-4)
    assert 0 < values["ratio/clip_share"] < 1
    assert plain["ratio/clip_share"] == 0.0
    assert not {"kl/reference_nats", "entropy/policy_nats"} & set(plain)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_filtered_rows_are_counted_once(tiny_model, make_rows, minibatches):
    """Rows, not tokens, over all updates of a step; without a filter there is no such number."""
    rows, model = make_rows(21), tiny_model()
    filtered = Component("own", Filtered(Clipped(base="behaviour"), 0.2), 1.0, "rows", "own")
    expected, num_bad = 0, 0
    for row, _, logp_T in slow_rows(model, rows):
        if row.component == "own" and row.advantages[0] < 0:
            expected += float(row.behaviour_logprobs.mean()) - float(logp_T.detach().mean()) > 0.2
            num_bad += 1
    assert 0 < expected < num_bad

    settings = table(minibatches=minibatches, lr=1e-30)
    values = trainer(model, settings, components=(filtered, RESCUE)).train(order(rows), 0)

    assert values["sharing/filtered_rows"] == expected
    assert "sharing/filtered_rows" not in trainer(tiny_model(), table(lr=1e-30)).train(order(rows), 0)


def test_a_component_with_a_reference_needs_one(tiny_model):
    """Wiring that forgot the reference is found before the first step."""
    with pytest.raises(AssertionError, match="reference"):
        trainer(tiny_model(), table(), components=MANY)


def test_an_update_of_masked_rows_alone_moves_nothing(tiny_model, make_rows):
    """Rows that keep their places without any weight are as none: momentum alone would move the parameters."""
    one = trainer(tiny_model(), table())
    rows = make_rows(8)
    one.train(order(rows), 0)
    before = [parameter.clone() for parameter in one.model.parameters()]
    one.train(order([replace(row, weights=np.zeros_like(row.weights)) for row in rows]), 1)
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))
    one.train(order(rows), 2)
    assert not all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))


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


@pytest.mark.parametrize("is_gradient_finite", [False, True])
def test_a_loss_that_is_not_finite_skips_the_update_whatever_its_gradient(
    tiny_model, make_rows, monkeypatch, is_gradient_finite
):
    """A NaN in the batch, or an infinite constant, which leaves every gradient finite: the step says it was skipped."""
    rows = [row for row in make_rows(4) if row.component == "own"]
    if is_gradient_finite:
        infinite = lambda *args: [loss + math.inf for loss in component_losses(*args)]  # noqa: E731
        monkeypatch.setattr("mrl.learner.step.component_losses", infinite)
    else:
        rows[0].advantages[:] = np.nan
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]

    values = trainer(model, table()).train(StepOrder(rows, {"own": 4.0, "rescue": 1.0}), 0)

    assert math.isfinite(values["optim/grad_norm"]) == is_gradient_finite
    assert values["optim/skipped"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_training_scores_what_the_model_scores(tiny_model, family):
    """The head is checked at start; one that is more than a matrix is refused."""
    model, ids = tiny_model(family), canary_sequences(64, num_tokens=8)
    use_row_attention(model)
    check_forward(model, ids)

    model.register_forward_hook(lambda _module, _inputs, output: setattr(output, "logits", 2 * output.logits))
    with pytest.raises(ModelFolderError, match="does not match the model's own forward"):
        check_forward(model, ids)


def test_the_learning_rate_falls_in_a_straight_line():
    """From the first step to the last, and it reaches the optimizer."""
    falling = table(lr=2.0, lr_final_share=0.25)
    rates = [learning_rate(falling, step, 5) for step in (0, 2, 4, 9)]

    assert rates == [2.0, 1.25, 0.5, 0.5]
    assert learning_rate(falling, 0, 1) == 2.0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_rises_before_it_falls(schedule):
    """In a straight line to the highest, then down to the share that is left; the cosine slowly at both ends."""
    settings = table(lr=2.0, lr_final_share=0.25, warmup_steps=4, lr_schedule=schedule)
    rates = [learning_rate(settings, step, 13) for step in range(13)]

    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[8] == pytest.approx(1.25)
    assert rates[12] == pytest.approx(0.5)
    quarter = 2.0 - 1.5 * (0.25 if schedule == "linear" else (1 - math.sqrt(0.5)) / 2)
    assert rates[6] == pytest.approx(quarter)
    assert learning_rate(settings, 4, 5) == 2.0


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


@pytest.mark.parametrize(
    ("wanted", "can", "kernel"), [("auto", True, "varlen"), ("auto", False, "rows"), ("rows", True, "rows")]
)
def test_the_attention_kernel_is_what_can_be_had(tiny_model, monkeypatch, wanted, can, kernel):
    """Chosen by default it falls back, and says why."""
    monkeypatch.setattr("mrl.learner.trainer.prove_varlen", _proof(can=can))
    with capture_logs() as said:
        made = Trainer(
            tiny_model(), LearnerTable(attention_kernel=wanted), (GRPO,), temperature=1.0, seed=0, total_steps=1,
            world=World(0, 1, torch.device("cpu")),
        )  # fmt: skip
    assert made.model.config._attn_implementation == NAMES[kernel]
    told = [
        (line["log_level"], line["chosen"], line["reason"])
        for line in said
        if line["event"] == "attention kernel selected"
    ]
    level, reason = ("info", "verified") if can else ("warning", "it fails here")
    assert told == ([] if wanted == "rows" else [(level, kernel, reason)])


def test_an_attention_kernel_that_was_asked_for_and_cannot_be_had_ends_the_run(tiny_model, monkeypatch):
    monkeypatch.setattr("mrl.learner.trainer.prove_varlen", _proof(can=False))
    with pytest.raises(ConfigError, match="it fails here"):
        agreed_kernel("varlen", tiny_model(), World(0, 1, torch.device("cpu")))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_shared_passes_are_refused_where_positions_follow_the_length_of_a_row(tiny_model, kind):
    """A rank would turn its part of a row as if that were all of it."""
    model = tiny_model()
    model.model.rotary_emb.rope_type = kind
    settings = LearnerTable(processes=2, context_parallel=2)
    with pytest.raises(
        ModelFolderError, match=r"learner.context_parallel: this model's rotary frequencies .* longrope or dynamic"
    ):
        Trainer(
            model, settings, (GRPO,), temperature=1.0, seed=0, total_steps=1, world=World(0, 2, torch.device("cpu"))
        )


def _proof(*, can: bool):
    def prove(device, heads):
        if not can:
            raise ConfigError("it fails here")

    return prove
