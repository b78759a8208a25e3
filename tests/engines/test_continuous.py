"""Continuous batching samples what a full forward says, and computes no row and reads no prompt twice."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3NextConfig

from mrl.engines import slot_cache
from mrl.engines.continuous import ContinuousBatch
from mrl.engines.engine import Decoding, FinishedAnswer, GenerationRequest, Sampling
from mrl.engines.slot_cache import CachedRow, CachedRows, SlotCache
from mrl.engines.token_sampling import answer_seeds
from mrl.errors import EngineError
from mrl.records.version import Version, VersionSpan

EOS = (1, 9, 11, 20, 33, 40)
WINDOW = 6
OLD, NEW = Version(0, 3), Version(0, 4)


@pytest.fixture
def make_model(tiny_model):
    """A small model of a family; Gemma's first layer sees a window that is shorter than most answers."""

    def make(family: str = "qwen3", seed: int = 1):
        if family != "gemma3":
            return tiny_model(family, seed=seed)
        torch.manual_seed(seed)
        shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW}
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.3}
        return Gemma3ForCausalLM(Gemma3TextConfig(**shape, **heads, **kinds)).eval()

    return make


def batch_of(model, *, max_running: int = 64, max_new_tokens: int = 40, temperature: float = 1.0) -> ContinuousBatch:
    batch = ContinuousBatch(model, Sampling(temperature, max_new_tokens, EOS), max_running=max_running)
    batch.relabel(OLD)
    return batch


def requests(count: int, group_size: int = 4) -> list[GenerationRequest]:
    """Prompts of 1 to 11 tokens."""
    rng = np.random.default_rng(0)
    sizes = [1, *rng.integers(1, 12, size=count - 1)]
    return [
        GenerationRequest(
            f"r{i}", rng.integers(2, 64, size=n).astype(np.int32), answer_seeds(0, "a", f"p{i}", 0, group_size)
        )
        for i, n in enumerate(sizes)
    ]


def run(batch: ContinuousBatch, asked: list[GenerationRequest]) -> list[FinishedAnswer]:
    batch.submit(asked)
    finished = []
    while batch.in_flight:
        finished += batch.step()
    return finished


def by_name(finished: list[FinishedAnswer]) -> dict:
    return {(one.request_id, one.index): one.generation for one in finished}


def reference(model, prompt: np.ndarray, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """[T] log-probabilities by one forward without a cache."""
    ids = torch.tensor(np.concatenate([prompt, tokens]).astype(np.int64))
    with torch.no_grad():
        logprobs = (model(ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
    return logprobs[prompt.size - 1 : -1].gather(-1, ids[prompt.size :, None]).squeeze(-1)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("max_running", [3, 64])
def test_logprobs_are_those_of_a_full_forward(make_model, monkeypatch, family, max_running):
    """With rows that are refilled, dropped and moved all the time, every log-probability is right to 1e-4."""
    monkeypatch.setattr(slot_cache, "SPARE_COLUMNS", 1)
    model, asked = make_model(family), requests(9)
    prompts = {request.request_id: request.prompt_token_ids for request in asked}

    finished = run(batch_of(model, max_running=max_running, temperature=0.8), asked)

    assert Counter(one.request_id for one in finished) == dict.fromkeys(prompts, 4)
    assert max(one.generation.token_ids.size for one in finished) > 2 * WINDOW
    for one in finished:
        expected = reference(model, prompts[one.request_id], one.generation.token_ids, 0.8)
        np.testing.assert_allclose(one.generation.logprobs, expected, atol=1e-4)


def said(turns: list[FinishedAnswer], asked: list[GenerationRequest]) -> dict[str, np.ndarray]:
    """Conversation -> all that its next prompt begins with."""
    prompts = {one.request_id: one for one in asked}
    return {
        prompts[turn.request_id].conversations[turn.index]: np.concatenate(
            [prompts[turn.request_id].prompt_token_ids, turn.generation.token_ids]
        )
        for turn in turns
    }


def next_turns(past: dict[str, np.ndarray], turn: int) -> list[GenerationRequest]:
    """Of every conversation, behind 1 to 9 tokens of its environment."""
    rng = np.random.default_rng(turn)
    return [
        GenerationRequest(
            f"{name}|{turn}",
            np.concatenate([ids, rng.integers(2, 64, size=rng.integers(1, 10)).astype(np.int32)]),
            answer_seeds(0, "a", name, turn, 1),
            conversations=(name,),
        )
        for name, ids in past.items()
    ]


def opening(count: int) -> list[GenerationRequest]:
    """First turns of the conversations of so many groups."""
    return [
        replace(one, conversations=tuple(f"{one.request_id}/{place}" for place in range(one.seeds.size)))
        for one in requests(count)
    ]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_of_a_conversation_only_what_is_new_is_read(make_model, family):
    """Three turns of 24 conversations, which have room: each log-probability is that of a full forward.

    Read are, of the prompts of a forward, as many tokens of each as are new in the one that has most of them.
    """
    model, asked = make_model(family), opening(6)
    batch = batch_of(model, temperature=0.8)
    past = said(run(batch, asked), asked)
    read_once = batch.prompt_tokens - batch.reused_prompt_tokens
    assert read_once == sum(one.prompt_token_ids.size - 1 for one in asked), "a prompt once for all answers to it"
    for turn in (1, 2):
        asked = next_turns(past, turn)
        turns = run(batch, asked)
        assert len(turns) == 24
        for one in turns:
            (prompt,) = (request.prompt_token_ids for request in asked if request.request_id == one.request_id)
            expected = reference(model, prompt, one.generation.token_ids, 0.8)
            np.testing.assert_allclose(one.generation.logprobs, expected, atol=1e-4)
        past = said(turns, asked)
    read = batch.prompt_tokens - batch.reused_prompt_tokens - read_once
    assert read <= 2 * 24 * 9  # up to 9 tokens of the environment, and the last that was sampled, which nothing read


@pytest.mark.parametrize(("max_running", "num_kept"), [(24, 24), (32, 24), (10, 10)])
def test_conversations_are_kept_while_rows_are_free(make_model, max_running, num_kept):
    """The last that had their turn, each until its next one begins."""
    model, asked = make_model(), opening(6)
    batch = batch_of(model, max_running=max_running)
    turns = run(batch, asked)
    past = said(turns, asked)
    num_layers, order = model.config.num_hidden_layers, list(past)
    assert len(batch._kept.tensors()) == 2 * num_layers * num_kept

    reused, going_on = batch.reused_prompt_tokens, order[-num_kept:][1:]
    batch.submit(next_turns({name: past[name] for name in going_on}, 1))
    ended = batch.step()

    assert batch.reused_prompt_tokens > reused
    kept = {one.request_id.partition("|")[0] for one in ended} | {order[-num_kept]}
    assert set(batch._kept._rows) == kept


def test_no_row_is_kept_that_an_answer_waits_for(make_model):
    """Four rows for 24 answers, of which the last four have no successor."""
    batch, asked = batch_of(make_model(), max_running=4), opening(6)
    batch.submit(asked)
    while batch.in_flight:
        batch.step()
        assert not (batch.waiting and batch._kept.tensors())
    assert batch._kept.tensors()


def test_rows_are_kept_in_no_more_room_than_they_are_given():
    """The last ones, by rows or by tokens."""
    kept = CachedRows()
    for name, size in (("a", 4), ("b", 3), ("c", 2)):
        kept.keep(name, CachedRow(np.zeros(size, np.int32), []))
    kept.leave_room(3, 8)
    assert [*kept._rows] == ["b", "c"]
    kept.leave_room(1, 8)
    assert [*kept._rows] == ["c"]


def test_no_prompt_is_read_twice(make_model):
    """Nor beside one whose row was given away while it waited, among others that were read ahead."""
    batch, first = batch_of(make_model(), max_running=2), opening(2)[1:]
    ((name, ids), *_) = said(run(batch, [replace(first[0], seeds=first[0].seeds[:1])]), first).items()
    (again,) = next_turns({name: ids}, 1)
    fresh = [replace(one, seeds=one.seeds[:1], request_id=f"f{place}") for place, one in enumerate(requests(5)[1:])]
    before = batch.prompt_tokens
    batch.submit([fresh[0], fresh[1], again, *fresh[2:]])
    batch.step()
    batch._kept.leave_room(0, 0)
    while batch.in_flight:
        batch.step()
    assert batch.prompt_tokens - before == sum(one.prompt_token_ids.size - 1 for one in [again, *fresh])


def test_nothing_is_kept_over_a_change_of_weights(make_model):
    """Nor of a turn in whose middle they changed."""
    model, asked = make_model(), opening(3)
    batch = batch_of(model)
    past = said(run(batch, asked), asked)
    batch.relabel(NEW)
    of_groups = batch.reused_prompt_tokens
    turns = run(batch, second := next_turns(past, 1))
    assert batch.reused_prompt_tokens == of_groups
    batch.submit(third := next_turns(said(turns, second), 2))
    batch.step()
    reused = batch.reused_prompt_tokens
    batch.relabel(OLD)
    turns = []
    while batch.in_flight:
        turns += batch.step()
    run(batch, next_turns(said(turns, third), 3))
    assert batch.reused_prompt_tokens == reused > of_groups


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_conversation_that_is_told_anew_shares_what_it_begins_with(make_model, is_cut):
    """Another word in its middle, or cut off: what stands before is not read again, but for one token at least."""
    model, asked = make_model(), opening(2)[1:]
    batch = batch_of(model)
    ((name, ids), *_) = said(run(batch, asked), asked).items()
    of_group = batch.reused_prompt_tokens
    told = ids[:5] if is_cut else np.concatenate([ids[:3], (ids[3:4] + 1) % 64, ids[4:], ids[:1]])
    (turn,) = run(batch, [GenerationRequest("anew", told, answer_seeds(0, "a", name, 1, 1), conversations=(name,))])
    assert batch.reused_prompt_tokens - of_group == 3
    expected = reference(model, told, turn.generation.token_ids, 1.0)
    np.testing.assert_allclose(turn.generation.logprobs, expected, atol=1e-4)


def test_what_is_sampled_does_not_depend_on_the_rows_beside_it(make_model):
    """One slot, few or many, alone or among others: the same answers."""
    model, asked = make_model(), requests(6)

    together = by_name(run(batch_of(model), asked))
    alone = by_name(run(batch_of(model), asked[4:5]))

    for max_running in (1, 5):
        narrow = by_name(run(batch_of(model, max_running=max_running), asked))
        assert all(np.array_equal(narrow[name].token_ids, together[name].token_ids) for name in together)
    assert len(alone) == 4
    assert all(np.array_equal(alone[name].token_ids, together[name].token_ids) for name in alone)


def test_the_same_requests_give_the_same_bits(make_model):
    """Also in a batch that has sampled others before, whose cache lies elsewhere."""
    model, asked = make_model(), requests(8)
    used = batch_of(model, max_running=7)
    run(used, requests(3, group_size=2))

    first, second = run(batch_of(model, max_running=7), asked), run(used, asked)

    assert [(one.request_id, one.index) for one in first] == [(one.request_id, one.index) for one in second]
    for one, other in zip(first, second, strict=True):
        assert one.generation.token_ids.tobytes() == other.generation.token_ids.tobytes()
        assert one.generation.logprobs.tobytes() == other.generation.logprobs.tobytes()


def test_rows_that_are_decoded_otherwise_change_no_bit_of_the_rows_beside_them(make_model):
    """Half of the answers greedy: the other half is sampled as without it. The same rows run in both batches."""
    model, asked = make_model(), requests(8)
    mixed = [replace(one, decoding=Decoding(0.0) if place % 2 else None) for place, one in enumerate(asked)]
    never = Sampling(1.0, 12, (99,))  # no answer ends before its limit, so that the rows stay as they are

    def answers(some: list[GenerationRequest]) -> dict:
        batch = ContinuousBatch(model, never, max_running=64)
        batch.relabel(OLD)
        return by_name(run(batch, some))

    plain, beside = answers(asked), answers(mixed)

    for name, one in plain.items():
        if int(name[0][1:]) % 2:
            continue
        assert one.token_ids.tobytes() == beside[name].token_ids.tobytes()
        assert one.logprobs.tobytes() == beside[name].logprobs.tobytes()
    greedy = [one.token_ids.tobytes() for name, one in beside.items() if name[0] == "r1"]
    assert len(greedy) == 4
    assert len(set(greedy)) == 1, "all answers to a prompt are the likeliest one"


def test_no_row_is_computed_in_vain_and_no_prompt_read_twice(make_model):
    """Rows of all forwards add up to the tokens that came out, prompt tokens to those of one answer per group."""
    model, asked = make_model(), requests(10)
    rows, read = [], []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (
            rows.append(len(kwargs["input_ids"])) if "logits_to_keep" not in kwargs else read.append(kwargs)
        ),
        with_kwargs=True,
    )
    batch = batch_of(model, max_running=6)

    finished = run(batch, asked)

    assert sum(rows) == batch.generated_tokens == sum(one.generation.token_ids.size for one in finished)
    assert max(rows) == 6
    assert sum(int(kwargs["attention_mask"].sum()) for kwargs in read) == sum(
        r.prompt_token_ids.size - 1 for r in asked
    )


def test_the_cache_is_cut_to_the_longest_row(make_model):
    """Attention sees no column that no living answer has."""
    model, widths = make_model(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append((kwargs["attention_mask"].shape[1], int(kwargs["position_ids"].max()))),
        with_kwargs=True,
    )

    run(batch_of(model, max_running=4), requests(10))

    assert all(width == longest + 1 for width, longest in widths)


def test_answers_come_in_the_order_in_which_they_end(make_model):
    """Side by side the shorter first; one at a time as they were handed in."""
    model, asked = make_model(), requests(6, group_size=2)

    lengths = [one.generation.token_ids.size for one in run(batch_of(model), asked)]
    names = [(one.request_id, one.index) for one in run(batch_of(model, max_running=1), asked)]

    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 1
    assert names == [(f"r{i}", j) for i in range(6) for j in range(2)]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_an_answer_goes_on_under_new_weights(make_model, family):
    """Spans say which tokens are whose; those after the change are sampled by the new weights over the old cache."""
    model, new = make_model(family, seed=1), make_model(family, seed=2)
    old_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompt = np.array([5, 9, 11], dtype=np.int32)
    batch = ContinuousBatch(model, Sampling(1.0, 12, (99,)), max_running=4)
    batch.relabel(OLD)
    batch.submit([GenerationRequest("r", prompt, np.array([7], dtype=np.uint64))])
    for _ in range(5):
        assert not batch.step()
    model.load_state_dict(new.state_dict())
    batch.relabel(NEW)

    (one,) = run(batch, [])

    assert one.generation.versions == [VersionSpan(5, OLD), VersionSpan(7, NEW)]
    ids = torch.tensor(np.concatenate([prompt, one.generation.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        model.load_state_dict(old_weights)
        # What was fed under the old weights: the prompt and the first four tokens; the fifth is fed under the new.
        before = model(ids[:, :7], use_cache=True)
        after = new(ids[:, 7:-1], past_key_values=before.past_key_values).logits
        logprobs = torch.cat([before.logits[0, 2:], after[0]]).log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, 3:, None]).squeeze(-1)
    np.testing.assert_allclose(one.generation.logprobs, expected, atol=1e-4)


def test_a_prompt_that_waits_while_weights_change_is_read_by_the_new_ones(make_model):
    """Prompts are read ahead; an answer that begins after the change owes nothing to the old weights."""
    model, new, asked = make_model(seed=1), make_model(seed=2), requests(6)
    batch = batch_of(model, max_running=2)
    batch.submit(asked)
    batch.step()
    model.load_state_dict(new.state_dict())
    batch.relabel(NEW)

    changed, expected = by_name(run(batch, [])), by_name(run(batch_of(new), asked))

    begun_after = [name for name, answer in changed.items() if answer.versions[0].version == NEW]
    assert len(begun_after) >= 20
    assert all(np.array_equal(changed[name].token_ids, expected[name].token_ids) for name in begun_after)


def test_the_same_version_again_makes_one_span(make_model):
    """Weights that were loaded again under the same name split no answer."""
    batch = batch_of(make_model())
    batch.submit(requests(4))
    batch.step()
    batch.relabel(OLD)

    assert all(one.generation.versions == [VersionSpan(one.generation.token_ids.size, OLD)] for one in run(batch, []))


def test_aborted_requests_leave_the_others_as_they_are(make_model):
    """Running, waiting or half begun, none of their answers comes out; what is left is what comes without them."""
    model, asked = make_model(), requests(6)
    batch = batch_of(model, max_running=6)
    batch.submit(asked)
    early = batch.step() + batch.step()
    batch.abort(["r0", "r1", "r4"])

    finished = by_name(run(batch, []))

    expected = by_name(run(batch_of(model), [asked[2], asked[3], asked[5]]))
    assert not early
    assert finished.keys() == expected.keys()
    assert all(np.array_equal(finished[name].token_ids, expected[name].token_ids) for name in finished)


def test_long_prompts_are_read_alone(make_model, monkeypatch):
    """One forward reads no more tokens than it may, padding included, but always at least one prompt."""
    monkeypatch.setattr("mrl.engines.continuous.PROMPT_TOKENS_AT_ONCE", 12)
    model, sizes = make_model(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()) if "logits_to_keep" in kwargs else None,
        with_kwargs=True,
    )
    lengths = [3, 3, 3, 20, 3]
    asked = [
        GenerationRequest(f"r{i}", np.full(n + 1, 5, dtype=np.int32), np.arange(2, dtype=np.uint64))
        for i, n in enumerate(lengths)
    ]

    run(batch_of(model), asked)

    assert sizes == [9, 20, 3]


def test_a_request_for_no_answers_asks_for_nothing(make_model):
    """It is not in flight."""
    batch = batch_of(make_model())
    batch.submit([GenerationRequest("r", np.array([5], dtype=np.int32), np.zeros(0, dtype=np.uint64))])

    assert not batch.in_flight
    assert batch.step() == []


def test_a_model_with_other_state_than_keys_and_values_is_refused():
    """Linear attention keeps a state that no column holds."""
    with pytest.raises(EngineError, match=r"qwen3_next.*LinearAttention"):
        SlotCache(Qwen3NextConfig(), 4)
