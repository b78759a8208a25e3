"""Seeded sampling: the token of a row depends on the row's logits and seed, not on the rows beside it."""

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.engines.engine import Decoding


def answer_seeds(
    run_seed: int, policy: str, prompt_id: str, step: int, group_size: int, *, position: int | None = None
) -> npt.NDArray[np.uint64]:
    """[G] seeds: a hash of (run seed, policy, prompt id, sample index, step) and, for training prompts, the position.

    A prompt that comes round again within one step has another position, so its answers have other seeds. Held-out
    prompts have no position, so they have the same seeds in every evaluation.
    """
    place = f"{step}" if position is None else f"{step}|{position}"
    digests = (
        hashlib.blake2b(f"{run_seed}|{policy}|{prompt_id}|{index}|{place}".encode(), digest_size=8).digest()
        for index in range(group_size)
    )
    return np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64)


def uniforms(seeds: npt.NDArray[np.uint64], places: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) for seeds of answers and places of tokens within them; both broadcast.

    SplitMix64 (Steele et al. 2014, doi 10.1145/2660193.2660195) over a counter, vectorised.
    """
    with np.errstate(over="ignore"):
        state = seeds + (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: Tensor, draws: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row of softmax(logits / temperature) by inverse transform.

    Takes [rows, V] logits and [rows] float64 uniform numbers; returns [rows] token ids and their [rows] float32
    log-probabilities in nats. The same number gives a row the same token, whatever rows are beside it.
    """
    scaled = logits.float() / temperature
    probabilities = scaled.softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    wanted = draws[:, None] * cumulative[:, -1:]
    # An index is beyond the last token only where logits are NaN. It is clamped, so that the canary reports the fault.
    tokens = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), probabilities.gather(-1, tokens).log_().squeeze(-1)


def sample_decoded(logits: Tensor, draws: Tensor, decoding: Decoding) -> tuple[Tensor, Tensor]:
    """As `sample`, by a Decoding; log-probabilities are those of the distribution over the tokens that are left.

    At temperature 0 the likeliest token is left alone, the first one of equals, with log-probability 0. With `top_p`
    the nucleus is left, the smallest set of likeliest tokens with probability `top_p` or more (arXiv 1904.09751,
    equation 2).
    """
    if decoding.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(tokens.shape, device=logits.device)
    if decoding.top_p >= 1:
        return sample(logits, draws, decoding.temperature)
    scaled = logits.float() / decoding.temperature
    likeliest, order = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = likeliest.softmax(-1)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    places, logprobs = sample(likeliest.masked_fill(before >= decoding.top_p, -torch.inf), draws, 1.0)
    return order.gather(-1, places[:, None]).squeeze(-1), logprobs
