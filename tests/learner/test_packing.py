"""Packing changes how rows are laid out and nothing else."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.learner.forward import ForwardSettings, answer_logprobs
from mrl.learner.packing import deal, pack, row_tokens
from mrl.models.row_attention import use_row_attention
from mrl.objectives.specs import Clipped, CrossSequence, Imitation
from mrl.sharing.regime import Component

COMPONENTS = (
    Component("own", Clipped(), 1.0, "rows", "own"),
    Component("rescue", Imitation(), 0.3, "rows", "peer"),
    Component("shared", CrossSequence(), 1.0, "rows", "peer"),
    Component("pooled", Clipped(base="behaviour"), 1.0, "rows", "peer"),
)
SETTINGS = ForwardSettings(temperature=0.8, chunk_tokens=7)


def with_shared_prompts(rows, answers_each):
    """The same answers behind fewer prompts: every `answers_each` neighbours have the first one's."""
    return [
        replace(row, prompt_token_ids=rows[place - place % answers_each].prompt_token_ids)
        for place, row in enumerate(rows)
    ]


def separate_logprobs(model, row):
    """[T] by a plain forward of transformers over this row alone."""
    ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.answer_token_ids]).astype(np.int64))
    logits = model(ids[None]).logits[0] / SETTINGS.temperature
    start = row.prompt_token_ids.size
    return logits.log_softmax(-1)[start - 1 : -1].gather(-1, ids[start:, None]).squeeze(-1)


def with_given_tokens(rows, seed=1):
    """The same rows as episodes: about half of the tokens of each are an environment's, but not the last one."""
    rng, found = np.random.default_rng(seed), []
    for row in rows:
        is_trained = rng.random(row.answer_token_ids.size) < 0.5
        is_trained[-1] = True
        names = ("advantages", "weights", "behaviour_logprobs", "behaviour_spans", "teacher_logprobs", "teacher_spans")
        kept = {name: getattr(row, name)[is_trained] for name in names if getattr(row, name) is not None}
        kept |= {
            name: np.unique(kept[name], return_inverse=True)[1].astype(np.int32)
            for name in names
            if name in kept and "spans" in name
        }
        kept["weights"] *= row.weights.sum() / kept["weights"].sum()  # a row weighs the same, however many are sampled
        found.append(replace(row, is_trained=is_trained, **kept))
    return found


def with_later_rows(rows, seed=3):
    """The same rows as episodes of up to three rows, each of which begins with given tokens."""
    rng, found = np.random.default_rng(seed), []
    for row in with_given_tokens(rows):
        begins = 1 + np.flatnonzero(~row.is_trained[1:] & row.is_trained[:-1])
        starts = np.sort(rng.permutation(begins)[:2]).astype(np.int32)
        found.append(replace(row, row_starts=starts) if starts.size else row)
    return found


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("microbatch_tokens", [1, 64, 10_000])
def test_later_rows_of_an_episode_see_nothing_of_what_stands_before(tiny_model, make_rows, family, microbatch_tokens):
    """Each is scored as by a plain forward over it alone, given tokens being no targets; to the loss they are one row,
    of the same tokens.
    """
    rows = with_later_rows(with_shared_prompts(make_rows(31), 4))
    assert {row.num_rows for row in rows} == {1, 2, 3}
    plain, model = tiny_model(family), tiny_model(family)
    use_row_attention(model)

    found = {}
    for batch in pack(rows, COMPONENTS, microbatch_tokens=microbatch_tokens):
        logprobs_T = answer_logprobs(model, batch, SETTINGS)
        found |= {place: logprobs_T[batch.row_T == place] for place in batch.row_T.unique().tolist()}
        if microbatch_tokens == 1:
            (place,) = batch.row_T.unique().tolist()
            assert batch.input_ids_L.numel() == row_tokens(rows[place])

    assert sorted(found) == list(range(31))
    for place, row in enumerate(rows):
        bounds = [0, *([] if row.row_starts is None else row.row_starts.tolist()), row.answer_token_ids.size]
        expected = []
        for number, (start, end) in enumerate(pairwise(bounds)):
            ids = row.answer_token_ids[start:end]
            prompt, answer = (ids[:1], ids[1:]) if number else (row.prompt_token_ids, ids)
            alone = replace(row, prompt_token_ids=prompt, answer_token_ids=answer)
            is_trained = row.is_trained[start + bool(number) : end]
            expected.append(separate_logprobs(plain, alone)[torch.from_numpy(is_trained)])
        assert torch.allclose(found[place], torch.cat(expected), atol=2e-5)


@pytest.mark.parametrize("answers_each", [1, 3, 8])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_packed_rows_equal_separate_rows(tiny_model, make_rows, family, answers_each):
    """Log-probabilities and gradients equal those of one plain forward per row, whether prompts are shared or not."""
    rows = with_shared_prompts(make_rows(23), answers_each)
    plain, model = tiny_model(family), tiny_model(family)
    use_row_attention(model)
    weight = torch.linspace(0.5, 1.5, sum(row.answer_token_ids.size for row in rows))

    batches = pack(rows, COMPONENTS, microbatch_tokens=64)
    order = list(dict.fromkeys(torch.cat([batch.row_T for batch in batches]).tolist()))
    packed = torch.cat([answer_logprobs(model, batch, SETTINGS) for batch in batches])
    separate = torch.cat([separate_logprobs(plain, rows[place]) for place in order])
    (packed * weight).sum().backward()
    (separate * weight).sum().backward()

    assert sorted(order) == list(range(23))
    assert torch.allclose(packed, separate, atol=2e-5)
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad, expected.grad, atol=1e-5 * float(expected.grad.abs().max()))


def test_gradients_are_the_same_bits_whatever_the_threads_do(tiny_model, make_rows):
    """A prompt's places and the one that predicts first tokens get gradients of many rows, in a fixed order."""
    model = tiny_model()
    use_row_attention(model)
    (batch,) = pack(with_shared_prompts(make_rows(64, longest=40), 32), COMPONENTS, microbatch_tokens=100_000)
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(4)
    try:
        for _ in range(8):
            model.zero_grad()
            answer_logprobs(model, batch, SETTINGS).sum().backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    finally:
        torch.set_num_threads(before)

    assert all(torch.equal(one, found[0]) for one in found)


def test_a_prompt_takes_its_places_once_in_a_pass(make_rows):
    """Its answers follow it, and every row knows where all of its tokens are."""
    rows = with_shared_prompts(make_rows(16), 4)
    (batch,) = pack(rows, COMPONENTS, microbatch_tokens=100_000)

    prompts = sum(row.prompt_token_ids.size for row in rows[::4])
    assert len(batch.input_ids_L) == prompts + sum(row.answer_token_ids.size - 1 for row in rows)
    places = batch.rows.places_R.split(batch.rows.lengths)
    for place, of_row in zip(dict.fromkeys(batch.row_T.tolist()), places, strict=True):
        tokens = np.concatenate([rows[place].prompt_token_ids, rows[place].answer_token_ids])[:-1]
        assert batch.input_ids_L[of_row].tolist() == tokens.tolist()
        assert batch.position_ids_L[of_row].tolist() == list(range(tokens.size))
    assert torch.equal(batch.rows.places_R[batch.rows.positions_L], torch.arange(len(batch.input_ids_L)))


def test_a_pass_that_is_full_repeats_the_prompt_in_the_next(make_rows):
    """Passes hold as many rows as fit, with their prompts: three of 8 + 6 tokens, in 8 + 3 * 6 places."""
    row = replace(make_rows(1)[0], prompt_token_ids=np.arange(8, dtype=np.int32))
    seven = {
        "answer_token_ids": np.arange(7, dtype=np.int32),
        **dict.fromkeys(("advantages", "weights", "behaviour_logprobs"), np.zeros(7, np.float32)),
    }

    passes = pack([replace(row, **seven)] * 7, COMPONENTS, microbatch_tokens=42)

    assert [len(batch.input_ids_L) for batch in passes] == [26, 26, 14]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_rows_without_loss_or_overlap(make_rows, world_size):
    """All ranks together hold every answer token once."""
    rows = make_rows(40)
    shares = [
        pack(rows, COMPONENTS, microbatch_tokens=96, rank=rank, world_size=world_size) for rank in range(world_size)
    ]

    targets = torch.cat([batch.target_ids_T for share in shares for batch in share])

    expected = np.concatenate([row.answer_token_ids for row in rows])
    assert sorted(targets.tolist()) == sorted(expected.tolist())
    assert all(len(batch.input_ids_L) <= 96 for share in shares for batch in share)


@pytest.mark.parametrize("rows_of", [list, with_given_tokens], ids=["answers", "given tokens"])
def test_every_token_keeps_what_its_row_says(make_rows, rows_of):
    """Values stay with their sampled tokens; rows without behaviour have 0, without a teacher NaN."""
    rows = rows_of(make_rows(40, shared=True))

    for batch in pack(rows, COMPONENTS, microbatch_tokens=96):
        for place in batch.row_T.unique().tolist():
            mine, row = (batch.row_T == place).numpy(), rows[place]
            absent = np.full(row.num_trained_tokens, np.nan, np.float32)
            behaviour = np.nan_to_num(absent) if row.behaviour_logprobs is None else row.behaviour_logprobs
            teacher = absent if row.teacher_logprobs is None else row.teacher_logprobs
            np.testing.assert_array_equal(batch.target_ids_T.numpy()[mine], row.trained_token_ids)
            np.testing.assert_array_equal(batch.advantages_T.numpy()[mine], row.advantages)
            np.testing.assert_array_equal(batch.weights_T.numpy()[mine], row.weights)
            np.testing.assert_array_equal(batch.behaviour_logprobs_T.numpy()[mine], behaviour)
            np.testing.assert_array_equal(batch.teacher_logprobs_T.numpy()[mine], teacher)
            if row.behaviour_spans is not None:
                spans = batch.behaviour_span_T.numpy()[mine]
                np.testing.assert_array_equal(np.diff(spans) == 0, np.diff(row.behaviour_spans) == 0)
            assert {COMPONENTS[index].name for index in batch.component_T[mine].tolist()} == {row.component}


def test_spans_are_numbered_over_all_rows(make_rows):
    """Tokens of one span of one row share a number with no other; without any span there is nothing to number."""
    rows = make_rows(40, shared=True)

    for batch in pack(rows, COMPONENTS, microbatch_tokens=100_000):
        for name, found_T in (("behaviour_spans", batch.behaviour_span_T), ("teacher_spans", batch.teacher_span_T)):
            expected = []
            for place in dict.fromkeys(batch.row_T.tolist()):
                spans = getattr(rows[place], name)
                numbers = range(rows[place].answer_token_ids.size) if spans is None else spans.tolist()
                expected += [(place, number) for number in numbers]
            assert len(set(zip(found_T.tolist(), expected, strict=True))) == len(set(found_T.tolist()))
            assert len(set(found_T.tolist())) == len(set(expected)) < len(expected)
            assert max(found_T.tolist()) < len(expected)
    assert pack(make_rows(8), COMPONENTS, microbatch_tokens=96)[0].behaviour_span_T is None


def test_a_row_longer_than_a_pass_gets_one_of_its_own(make_rows):
    """It is not cut."""
    rows = make_rows(5, longest=100)

    passes = pack(rows, COMPONENTS, microbatch_tokens=1)

    assert [len(batch.input_ids_L) for batch in passes] == [row_tokens(row) for row in rows]


def test_an_empty_batch_packs_to_nothing():
    """A step without rows has no forward pass."""
    assert pack([], COMPONENTS, microbatch_tokens=32) == []


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 5))
def test_rows_are_dealt_so_that_no_rank_waits_long(lengths, num_ranks):
    """Every row once; the fullest rank has at most one row more than the emptiest."""
    shares = deal(lengths, num_ranks)
    loads = [sum(lengths[index] for index in share) for share in shares]

    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert deal([8, 5, 4, 3], 2) == [[0, 3], [1, 2]]


@pytest.mark.parametrize(("answers_each", "prompts_on_both"), [(3, 0), (96, 1)])
def test_ranks_get_about_equally_much_and_prompts_stay_together(make_rows, answers_each, prompts_on_both):
    """A prompt is on one rank; only where it is more than an eighth of a rank's share, its answers are dealt."""
    rows = with_shared_prompts(make_rows(96), answers_each)
    shares = [pack(rows, COMPONENTS, microbatch_tokens=100_000, rank=rank, world_size=2)[0] for rank in range(2)]

    places = [len(batch.input_ids_L) for batch in shares]
    prompts = [{rows[row].prompt_token_ids.tobytes() for row in batch.row_T.tolist()} for batch in shares]
    assert max(places) - min(places) <= 0.05 * sum(places)
    assert len(prompts[0] & prompts[1]) == prompts_on_both


@pytest.mark.parametrize("count", [1, 3, 17])
def test_all_ranks_make_the_same_number_of_passes(make_rows, count):
    """A rank without rows, or with fewer, makes passes that hold nothing."""
    options = {"microbatch_tokens": 32, "world_size": 4}
    shares = [pack(make_rows(count, shared=True), COMPONENTS, rank=rank, **options) for rank in range(4)]

    assert len({len(share) for share in shares}) == 1
    assert any(len(batch.target_ids_T) == 0 for share in shares for batch in share) or count == 17


def test_a_pass_without_rows_gives_every_parameter_a_gradient_of_zero(tiny_model, make_rows):
    """Nothing is learnt from it, and it takes part in what all ranks do."""
    batch = pack(make_rows(1), COMPONENTS, microbatch_tokens=32, rank=1, world_size=2)[0]
    model = tiny_model()
    use_row_attention(model)

    answer_logprobs(model, batch, SETTINGS).sum().backward()

    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
