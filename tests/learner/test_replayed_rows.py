"""Experts of rows reach the places that their tokens are predicted at, however the rows are laid out and shared out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mrl.config.policy_tables import LearnerTable
from mrl.learner.forward import ForwardSettings, answer_logprobs
from mrl.learner.packing import pack
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder, decode_order, encode_order
from mrl.learner.trainer import Trainer
from mrl.models.routing.router_record import RouterRecord
from mrl.models.routing.router_replay import OWN, RouterReplay
from mrl.models.row_attention import use_row_attention
from mrl.objectives.specs import Clipped, Imitation, Regularizer
from mrl.sharing.regime import Component
from tests.learner.test_packing import with_given_tokens, with_later_rows, with_shared_prompts
from tests.support.mixtures import NUM_LAYERS, TOP_K, draw_experts, make_mixture, with_drawn_experts

COMPONENTS = (
    Component("own", Clipped(0.2, 0.2), 1.0, "rows", "own"),
    Component("rescue", Imitation(), 0.3, "rows", "peer"),
)
SETTINGS = ForwardSettings(temperature=0.8, chunk_tokens=7)
KINDS = {
    "answers": lambda rows: rows,
    "shared": lambda rows: with_shared_prompts(rows, 4),
    "episodes": with_given_tokens,
    "later_rows": with_later_rows,
}


def told_alone(row) -> torch.Tensor:
    """[P + T - 1, N, K] of a row of one piece, token by token."""
    told = np.full((row.prompt_token_ids.size + row.answer_token_ids.size - 1, NUM_LAYERS * TOP_K), OWN, np.int16)
    if row.prompt_experts is not None:
        told[: row.prompt_token_ids.size - 1] = row.prompt_experts
    trained = np.arange(row.answer_token_ids.size) if row.is_trained is None else np.flatnonzero(row.is_trained)
    for place, token in enumerate(trained if row.experts is not None else []):
        told[row.prompt_token_ids.size - 1 + token] = row.experts[place]
    return torch.from_numpy(told).view(-1, NUM_LAYERS, TOP_K)


@pytest.mark.parametrize("kind", ["answers", "episodes"])
@pytest.mark.parametrize("microbatch_tokens", [1, 64, 10_000])
def test_every_token_is_predicted_where_its_experts_are_told(make_rows, kind, microbatch_tokens):
    """Log-probabilities are those of each row alone, told by hand; rows of peers choose for themselves."""
    rows = with_drawn_experts(KINDS[kind](make_rows(23)))
    assert {row.prompt_experts is None for row in rows if row.component == "own"} == {True, False}
    plain, model = make_mixture(), make_mixture()
    RouterReplay(plain)
    routing = RouterReplay(model).shape
    use_row_attention(model)

    num_told = 0
    for batch in pack(rows, COMPONENTS, microbatch_tokens=microbatch_tokens, routing=routing):
        num_told += batch.experts_LNK is not None
        found_T = answer_logprobs(model, batch, SETTINGS)
        for place in batch.row_T.unique().tolist():
            row = rows[place]
            ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.answer_token_ids]).astype(np.int64))
            decoder = plain.get_decoder()
            hidden = decoder(input_ids=ids[None, :-1], use_cache=False, chosen_experts=told_alone(row))
            scores = (plain.lm_head(hidden.last_hidden_state[0]) / SETTINGS.temperature).log_softmax(-1)
            expected = scores.gather(-1, ids[1:, None])[row.prompt_token_ids.size - 1 :, 0]
            expected = expected if row.is_trained is None else expected[torch.from_numpy(row.is_trained)]
            torch.testing.assert_close(found_T[batch.row_T == place], expected, atol=2e-5, rtol=1e-5)
    assert num_told


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_is_told_of_one_token_alone(make_rows, kind):
    """All experts of a pass are those of some row, at the places of its tokens; all other places choose themselves."""
    rows = with_drawn_experts(KINDS[kind](make_rows(31)))
    routing = RouterReplay(make_mixture()).shape
    first_of = {row.prompt_token_ids.tobytes(): row for row in reversed(rows) if row.experts is not None}

    for batch in pack(rows, COMPONENTS, microbatch_tokens=64, routing=routing):
        told_LX = np.full((len(batch.input_ids_L), NUM_LAYERS * TOP_K), OWN)
        if batch.experts_LNK is not None:
            told_LX = batch.experts_LNK.flatten(1).numpy()
        of_tokens = set()
        for place in batch.row_T.unique().tolist():
            at_T = batch.predict_at_T[batch.row_T == place].numpy()
            of_tokens |= set(at_T.tolist())
            teller = first_of.get(rows[place].prompt_token_ids.tobytes())
            if kind == "shared" and teller is not None:
                np.testing.assert_array_equal(told_LX[at_T[0]], teller.experts[0])
            if rows[place].experts is not None:
                last = (
                    at_T[1:] if kind == "shared" else at_T
                )  # its first one's may be told by another row of the prompt
                np.testing.assert_array_equal(told_LX[last], rows[place].experts[len(at_T) - len(last) :])
        others = np.setdiff1d(np.arange(len(told_LX)), sorted(of_tokens))
        prompts = np.concatenate([row.prompt_experts for row in rows if row.prompt_experts is not None])
        for told in told_LX[others]:
            assert (told == OWN).all() or (prompts == told).all(1).any()


def test_experts_that_no_router_of_the_model_can_choose_are_left_out(make_rows):
    """Of another model, beyond the last expert, one of them twice, or of another number of tokens."""
    row = with_drawn_experts(make_rows(1))[0]
    routing = RouterReplay(make_mixture()).shape

    for experts in (row.experts[:, 1:], np.full_like(row.experts, 6), np.zeros_like(row.experts), row.experts[1:]):
        (batch,) = pack([replace(row, experts=experts)], COMPONENTS, microbatch_tokens=64, routing=routing)
        assert batch.experts_LNK is None or (batch.experts_LNK[batch.predict_at_T] == OWN).all()
    (batch,) = pack([row], COMPONENTS, microbatch_tokens=64)
    assert batch.experts_LNK is None, "a learner that replays nothing"


@pytest.mark.parametrize("untold", ["experts", "prompt_experts"])
def test_a_prompt_is_told_by_the_first_row_that_tells_of_it(make_rows, untold):
    """Its own places, and the one that all first tokens are predicted at, by whichever row has either."""
    rows = with_drawn_experts([replace(row, component="own") for row in with_shared_prompts(make_rows(4), 4)])
    before = draw_experts(np.random.default_rng(1), rows[0].prompt_token_ids.size - 1)
    rows = [replace(row, prompt_experts=before) for row in rows]
    rows[0] = replace(rows[0], **{untold: None})

    (batch,) = pack(rows, COMPONENTS, microbatch_tokens=10_000, routing=RouterReplay(make_mixture()).shape)

    told_LX = batch.experts_LNK.flatten(1).numpy()
    np.testing.assert_array_equal(told_LX[: len(before)], before)
    np.testing.assert_array_equal(told_LX[len(before)], rows[untold == "experts"].experts[0])


def test_experts_stay_in_main_memory_until_their_pass(make_rows):
    """Those of a whole step would take more of a device than all else of its rows."""
    routing = RouterReplay(make_mixture()).shape
    (batch,) = pack(with_drawn_experts(make_rows(1)), COMPONENTS, microbatch_tokens=64, routing=routing)

    moved = batch.to(torch.device("meta"))

    assert (moved.input_ids_L.device.type, moved.experts_LNK.device.type) == ("meta", "cpu")


def test_experts_cross_ranks_and_those_of_a_prompt_once(make_rows):
    """With ids above a byte, too."""
    rows = with_drawn_experts(with_shared_prompts(make_rows(16), 4))
    rows[0] = replace(rows[0], experts=rows[0].experts.astype("<u2") + 300)
    sent = encode_order(StepOrder(rows, {"own": 1.0}))

    received = decode_order(sent).examples

    for a, b in zip(rows, received, strict=True):
        np.testing.assert_array_equal(a.experts, b.experts)
        np.testing.assert_array_equal(a.prompt_experts, b.prompt_experts)
    without = [replace(row, prompt_experts=None) for row in rows]
    once = {id(row.prompt_experts): row.prompt_experts.size for row in rows if row.prompt_experts is not None}
    spent = len(sent) - len(encode_order(StepOrder(without, {"own": 1.0})))
    assert sum(once.values()) <= spent < sum(once.values()) + 30 * len(once)


def trained(rows, **table):
    """Parameters and metrics of one step of one rank."""
    model = make_mixture()
    learner = LearnerTable.model_validate({"lr": 1e-2, "microbatch_tokens": 64} | table)
    world = World(0, 1, torch.device("cpu"))
    trainer = Trainer(model, learner, COMPONENTS, temperature=1.0, seed=3, total_steps=9, world=world)
    metrics = trainer.train(StepOrder(rows, {"own": 8.0, "rescue": 3.0}), 0)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, metrics


def own_choice(rows):
    """The rows with what their learner would choose in the very passes that train them."""
    model = make_mixture()
    record = RouterRecord(model)
    use_row_attention(model)
    found = {}
    for batch in pack(rows, COMPONENTS, microbatch_tokens=64):
        with torch.no_grad():
            answer_logprobs(model, batch, SETTINGS)
        for place in batch.row_T.unique().tolist():
            found[place] = record.last()[batch.predict_at_T[batch.row_T == place].numpy()]
    return [replace(row, experts=found[place]) if row.component == "own" else row for place, row in enumerate(rows)]


@pytest.mark.parametrize("table", [{}, {"activation_checkpointing": True}, {"precision": "bfloat16"}])
def test_replaying_its_own_choice_trains_the_same_bits(make_rows, table):
    """All of a step; in bfloat16, where it would choose some otherwise, that is counted and changes what is learnt."""
    rows = own_choice(with_shared_prompts(make_rows(24), 4))
    plain, _ = trained(rows, **table)
    same, metrics = trained(rows, router_replay=True, **table)

    assert metrics["routing/replayed_share"] == 1.0
    assert all(torch.equal(plain[name], same[name]) for name in plain) == (metrics["routing/otherwise_share"] == 0)
    assert (metrics["routing/otherwise_share"] > 0) == (table.get("precision") == "bfloat16")


def test_a_step_says_how_much_it_replayed_and_how_often_routers_would_choose_otherwise(make_rows):
    """Over own tokens alone; a learner that replays nothing says nothing."""
    rows = with_drawn_experts(make_rows(24))
    own = [row for row in rows if row.component == "own"]
    odd = {id(own[0]): None, id(own[1]): np.zeros_like(own[1].experts), id(own[2]): own[2].experts[1:]}
    rows = [replace(row, experts=odd.get(id(row), row.experts)) for row in rows]

    parameters, metrics = trained(rows, router_replay=True)
    plain, without = trained(rows)

    sizes = [row.num_trained_tokens for row in own]
    assert metrics["routing/replayed_share"] == pytest.approx(1 - sum(sizes[:3]) / sum(sizes))
    assert 0.4 < metrics["routing/otherwise_share"] < 0.9, "two of six at random"
    assert not [name for name in without if name.startswith("routing/")]
    assert not all(torch.equal(parameters[name], plain[name]) for name in plain)


def test_the_reference_is_told_the_same(make_rows):
    """Equal weights stay equal in what they say; and were they told nothing, they would not."""
    rows = with_drawn_experts(make_rows(24))
    held = replace(COMPONENTS[0], regularizer=Regularizer(kl_coefficient=0.1))
    table = LearnerTable.model_validate({"lr": 1e-2, "microbatch_tokens": 64, "router_replay": True})
    world = World(0, 1, torch.device("cpu"))
    components, options = (held, COMPONENTS[1]), {"temperature": 1.0, "seed": 3, "total_steps": 9, "world": world}
    trainer = Trainer(make_mixture(), table, components, reference=make_mixture(), **options)

    metrics = trainer.train(StepOrder(rows, {"own": 8.0, "rescue": 3.0}), 0)

    assert metrics["kl/reference_nats"] == pytest.approx(0, abs=1e-9)


def test_drawn_experts_are_distinct():
    """In each layer, as those of a router are."""
    drawn = draw_experts(np.random.default_rng(0), 50).reshape(50, NUM_LAYERS, TOP_K)
    assert (drawn[:, :, 0] != drawn[:, :, 1]).all()
