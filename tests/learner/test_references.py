"""A learner's canaries: texts of what it trains on, and their scores before and after a step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mrl.config.policy_tables import LearnerTable
from mrl.learner.ranks.world import World
from mrl.learner.references import CanaryReferences
from mrl.learner.sharding import place
from mrl.learner.step_order import StepOrder
from mrl.models.row_attention import use_row_attention
from mrl.weights.canary import gap_nats, reference_logprobs, rounded_logprobs

PROMPTS = [[3, 5, 9, 2, 7], [4, 4, 8]]


@pytest.fixture
def trainer(tiny_model):
    """A model of one rank, in this precision, maybe wrapped."""

    def make(precision: str = "float32", *, rank: int = 0, device: str = "cpu", is_wrapped: bool = False):
        world = World(rank, 1, torch.device("cpu"))
        model = tiny_model()
        if is_wrapped:
            model = place(model, LearnerTable(precision="bfloat16"), world)
        else:
            use_row_attention(model)
        told = SimpleNamespace(is_first=rank == 0, device=torch.device(device))
        return SimpleNamespace(model=model, precision=precision, world=told)

    return make


def shift(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3


def test_the_first_canary_is_of_prompts_and_knows_no_version_before(trainer):
    """As after a resume."""
    canary = CanaryReferences(trainer(), PROMPTS).make()

    assert canary.token_ids == [[3, 5, 9, 2, 7], [4, 4, 8, 4]]
    assert canary.previous == []
    assert not gap_nats(canary, canary.rounded).problem


def test_later_ones_are_of_the_step_and_compare_with_the_version_before(trainer, make_rows):
    """Each with its own; one that is published without a step compares with nothing."""
    learner = trainer()
    references, rows = CanaryReferences(learner, PROMPTS), make_rows(4)
    for _ in range(2):
        references.before_step(StepOrder(rows, {}))
        before = reference_logprobs(learner.model, references.texts, "float32")
        shift(learner.model)
        canary = references.make()

        assert canary.previous == before != canary.logprobs
        assert canary.logprobs == reference_logprobs(learner.model, references.texts, "float32")
        texts = [[*row.prompt_token_ids.tolist(), *row.answer_token_ids.tolist()] for row in rows]
        assert all(row in texts for row in canary.token_ids)
        assert gap_nats(canary, before).problem
    assert references.make().previous == []


def test_a_step_of_no_rows_keeps_the_texts(trainer, make_rows):
    """As when all groups were uniform: the canary is that of the step before, and tells no two versions apart."""
    references = CanaryReferences(trainer(), PROMPTS)
    references.before_step(StepOrder(make_rows(4), {}))
    texts = references.texts

    references.before_step(StepOrder([], {}))

    canary = references.make()
    assert canary is not None
    assert references.texts == canary.token_ids == texts
    gap = gap_nats(canary, canary.rounded)
    assert not gap.problem
    assert not gap.tells_versions


@pytest.mark.parametrize(
    ("precision", "engine", "merges", "is_compared"),
    [
        ("float32", "float32", False, True),
        ("float32", "bfloat16", False, True),
        ("bfloat16", "bfloat16", False, True),
        ("bfloat16", "float32", False, False),
        ("bfloat16", "float16", False, False),
        ("float32", "float32", True, True),
        ("float32", "bfloat16", True, False),
    ],
)
def test_versions_are_compared_where_the_learner_knows_how_the_engine_rounds_weights(
    trainer, make_rows, precision, engine, merges, is_compared
):
    """Where it does not, its own rounding would look like a part of the step."""
    references = CanaryReferences(trainer(precision), PROMPTS, engine_format=engine, merges_adapters=merges)
    references.before_step(StepOrder(make_rows(2), {}))

    assert bool(references.make().previous) == is_compared


@pytest.mark.parametrize(
    ("engine", "sends", "is_rounded"), [("bfloat16", True, True), ("bfloat16", False, False), ("float32", True, False)]
)
def test_adapters_in_16_bits_are_compared_with_the_rounded_pass_of_the_version_before(
    trainer, make_rows, engine, sends, is_rounded
):
    """Whole weights and wider numbers are not."""
    learner = trainer()
    references = CanaryReferences(learner, PROMPTS, engine_format=engine, sends_adapters=sends)
    references.before_step(StepOrder(make_rows(2), {}))
    before = rounded_logprobs(learner.model, references.texts, "bfloat16")
    shift(learner.model)

    canary = references.make()

    assert canary.previous
    assert canary.previous_rounded == (before if is_rounded else [])
    assert references.make().previous_rounded == []


@pytest.mark.parametrize(
    ("precision", "engine", "device", "noise_nats"),
    [
        ("float32", "float32", "cpu", (0.0, 1e-5)),
        ("float32", "float32", "cuda", (1e-4, 4e-3)),
        ("float32", "bfloat16", "cpu", (4e-3, 1e-1)),
        ("bfloat16", "float32", "cpu", (4e-3, 1e-1)),
    ],
)
def test_noise_is_that_of_the_coarser_format(trainer, precision, engine, device, noise_nats):
    """On a GPU float32 is multiplied on tensor cores."""
    canary = CanaryReferences(trainer(precision, device=device), PROMPTS, engine_format=engine).make()

    noise = [np.abs(np.subtract(a, b)).mean() for a, b in zip(canary.rounded, canary.logprobs, strict=True)]
    assert noise_nats[0] <= np.mean(noise) <= noise_nats[1]


@pytest.mark.parametrize(("rank", "is_wrapped", "takes_part"), [(0, False, True), (1, False, False), (1, True, True)])
def test_every_rank_of_a_sharded_model_takes_part(trainer, make_rows, rank, is_wrapped, takes_part):
    """It has no forward of its own; where a rank holds all, the first one is enough."""
    learner = trainer(rank=rank, is_wrapped=is_wrapped)
    passes = []
    learner.model.register_forward_hook(lambda *_: passes.append(1))
    references = CanaryReferences(learner, PROMPTS)

    references.before_step(StepOrder(make_rows(2), {}))
    canary = references.make()

    assert (canary is not None, bool(passes)) == (takes_part, takes_part)
    assert len(references.texts) == 2, "the same texts on every rank"
