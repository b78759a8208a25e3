"""Seeded sampling is uniform, independent of batching, and draws from the softmax."""

import numpy as np
import torch

from mrl.engines.sampling import SeededSampler, answer_seeds, uniforms


def test_seeds_differ_by_every_part_of_their_key():
    """Policy, prompt, sample index, step and run seed each change the seed."""
    base = answer_seeds(1, "a", "p", 0, 4)
    others = [answer_seeds(2, "a", "p", 0, 4), answer_seeds(1, "b", "p", 0, 4), answer_seeds(1, "a", "q", 0, 4)]
    others.append(answer_seeds(1, "a", "p", 1, 4))

    assert len(set(np.concatenate([base, *others]).tolist())) == 20
    assert np.array_equal(base[:2], answer_seeds(1, "a", "p", 0, 2))


def test_uniforms_are_uniform_and_depend_on_their_own_seed_only():
    """100k numbers fill ten equal bins evenly, and a row is the same whatever rows stand beside it."""
    seeds = answer_seeds(0, "a", "p", 0, 1000)
    numbers = uniforms(seeds, 100)
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]

    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert np.abs(counts - 10_000).max() < 400
    assert np.array_equal(uniforms(seeds[3:4], 100)[0], numbers[3])


def test_samples_follow_the_softmax_at_the_given_temperature():
    """Frequencies of 40k draws equal softmax(logits / temperature) within four standard errors."""
    logits, temperature, rows = torch.tensor([2.0, 0.0, -1.0, 1.0]), 0.7, 40_000
    sampler = SeededSampler(answer_seeds(0, "a", "p", 0, rows), 1, temperature)

    chosen = sampler(torch.empty(rows, 0), logits.expand(rows, 4)).argmax(-1)

    expected = (logits / temperature).softmax(-1)
    frequency = torch.bincount(chosen, minlength=4) / rows
    error = (expected * (1 - expected) / rows).sqrt()
    assert ((frequency - expected).abs() < 4 * error).all()
    assert torch.allclose(sampler.logprobs[0], expected.log()[chosen], atol=1e-6)


def test_a_token_of_probability_zero_is_never_drawn():
    """A masked token stays masked."""
    logits = torch.tensor([float("-inf"), 0.0, float("-inf")]).expand(1000, 3)
    sampler = SeededSampler(answer_seeds(0, "a", "p", 0, 1000), 1, 1.0)

    assert (sampler(torch.empty(1000, 0), logits).argmax(-1) == 1).all()
    sampler = SeededSampler(answer_seeds(0, "a", "p", 0, 1000), 1, 1.0)
    sampler._uniforms.zero_()
    assert (sampler(torch.empty(1000, 0), logits).argmax(-1) == 1).all()
