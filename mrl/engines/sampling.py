"""Seeded sampling: what is sampled for a row depends on its seed alone, not on the rows beside it."""

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import LogitsProcessor


def answer_seeds(run_seed: int, policy: str, prompt_id: str, step: int, group_size: int) -> npt.NDArray[np.uint64]:
    """[G] seeds: a hash of (run seed, policy, prompt id, sample index, step)."""
    digests = (
        hashlib.blake2b(f"{run_seed}|{policy}|{prompt_id}|{index}|{step}".encode(), digest_size=8).digest()
        for index in range(group_size)
    )
    return np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64)


def uniforms(seeds: npt.NDArray[np.uint64], num_tokens: int) -> npt.NDArray[np.float64]:
    """[rows, num_tokens] uniform numbers in [0, 1); row i depends on `seeds[i]` alone.

    SplitMix64 (Steele et al. 2014, doi 10.1145/2660193.2660195) over a counter, vectorised.
    """
    counter = np.arange(1, num_tokens + 1, dtype=np.uint64)[None, :] * np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = seeds[:, None] + counter
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


class SeededSampler(LogitsProcessor):
    """Samples inside transformers' `generate`: the chosen token keeps its place, all others become -inf.

    Inverse transform sampling of softmax(logits / temperature) with one uniform number per row and token, so that
    greedy decoding of what is left is the sample. `logprobs` collects the log-probability of every chosen token.
    """

    def __init__(self, seeds: npt.NDArray[np.uint64], max_new_tokens: int, temperature: float) -> None:
        self._uniforms = torch.from_numpy(uniforms(seeds, max_new_tokens))
        self._temperature = temperature
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Take [rows, V] logits of the next token; return them with one finite entry per row."""
        logprobs = (scores.float() / self._temperature).log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        draw = self._uniforms[:, len(self.logprobs), None].to(scores.device) * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, draw, right=True).clamp_(max=scores.shape[-1] - 1)
        self.logprobs.append(logprobs.gather(-1, chosen).squeeze(-1).cpu())
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)
