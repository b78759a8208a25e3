"""Seeded sampling is uniform, independent of batching, and draws from the softmax."""

import numpy as np
import torch

from mrl.engines.engine import Decoding
from mrl.engines.token_sampling import answer_seeds, sample, sample_decoded, uniforms


def draws(rows: int) -> torch.Tensor:
    return torch.from_numpy(uniforms(answer_seeds(0, "a", "p", 0, rows), np.zeros(1, dtype=np.int64)))


def test_seeds_differ_by_every_part_of_their_key():
    """Policy, prompt, sample index, step, position and run seed each change the seed."""
    base = answer_seeds(1, "a", "p", 0, 4)
    others = [answer_seeds(2, "a", "p", 0, 4), answer_seeds(1, "b", "p", 0, 4), answer_seeds(1, "a", "q", 0, 4)]
    others += [answer_seeds(1, "a", "p", 1, 4), *(answer_seeds(1, "a", "p", 0, 4, position=place) for place in (0, 7))]

    assert len(set(np.concatenate([base, *others]).tolist())) == 28
    assert np.array_equal(base[:2], answer_seeds(1, "a", "p", 0, 2))


def test_uniforms_are_uniform_and_depend_on_their_own_seed_and_place_only():
    """100k numbers fill ten equal bins evenly, and a number is the same whatever others are asked for beside it."""
    seeds = answer_seeds(0, "a", "p", 0, 1000)
    numbers = uniforms(seeds[:, None], np.arange(100))
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]

    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert np.abs(counts - 10_000).max() < 400
    assert np.array_equal(uniforms(seeds[3:5], np.array([7, 99])), numbers[[3, 4], [7, 99]])


def test_samples_follow_the_softmax_at_the_given_temperature():
    """Frequencies of 40k draws equal softmax(logits / temperature) within four standard errors."""
    logits, temperature, rows = torch.tensor([2.0, 0.0, -1.0, 1.0]), 0.7, 40_000

    tokens, logprobs = sample(logits.expand(rows, 4), draws(rows), temperature)

    expected = (logits / temperature).softmax(-1)
    frequency = torch.bincount(tokens, minlength=4) / rows
    error = (expected * (1 - expected) / rows).sqrt()
    assert ((frequency - expected).abs() < 4 * error).all()
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_a_token_of_probability_zero_is_never_drawn():
    """A masked token stays masked, also at both ends of the uniform numbers."""
    logits = torch.tensor([float("-inf"), 0.0, float("-inf")])
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)

    for numbers in (draws(1000), ends):
        tokens, logprobs = sample(logits.expand(len(numbers), 3), numbers, 1.0)
        assert (tokens == 1).all()
        assert (logprobs == 0).all()


def test_logits_that_are_not_numbers_give_no_number():
    """Broken weights end in log-probabilities that no canary passes, not in an index error."""
    _, logprobs = sample(torch.full((4, 8), float("nan")), draws(4), 1.0)

    assert logprobs.isnan().all()


def test_at_temperature_0_the_likeliest_token_is_taken_the_first_of_equals():
    """Whatever number is drawn; its probability is one."""
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, -1.0]])

    tokens, logprobs = sample_decoded(logits, torch.tensor([0.999, 0.001], dtype=torch.float64), Decoding(0.0))

    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]


def test_a_nucleus_is_the_fewest_likeliest_tokens_that_have_its_probability():
    """Of probabilities 0.5, 0.3, 0.15, 0.05, top_p 0.8 keeps two, and a little more keeps three; frequencies follow."""
    wanted, rows = torch.tensor([0.15, 0.5, 0.05, 0.3]), 40_000
    logits = wanted.log() * 0.7

    for top_p, kept in ((0.79, [1, 3]), (0.85, [0, 1, 3]), (0.1, [1])):
        tokens, logprobs = sample_decoded(logits.expand(rows, 4), draws(rows), Decoding(0.7, top_p=top_p))
        found = torch.bincount(tokens, minlength=4) / rows
        left = torch.zeros(4)
        left[kept] = wanted[kept] / wanted[kept].sum()
        assert (found - left).abs().max() < 4 * 0.5 / rows**0.5
        torch.testing.assert_close(logprobs, left[tokens].log(), atol=1e-5, rtol=0)


def test_a_decoding_with_the_whole_vocabulary_is_plain_sampling_bit_for_bit():
    """Temperature 0.7, top_p 1."""
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))

    plain, decoded = sample(logits, draws(64), 0.7), sample_decoded(logits, draws(64), Decoding(0.7))

    assert all(torch.equal(one, other) for one, other in zip(plain, decoded, strict=True))
