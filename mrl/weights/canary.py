"""The canary: fixed sequences that tell whether an engine serves the weights that the learner published."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mrl.weights.manifest import Canary

DEFAULT_TOLERANCE_NATS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def canary_sequences(
    vocab_size: int, *, num_sequences: int = 4, num_tokens: int = 16, seed: int = 0
) -> list[list[int]]:
    """Random token ids, the same for the same arguments: [num_sequences][num_tokens]."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, size=(num_sequences, num_tokens))
    return [[int(token) for token in row] for row in ids]


@torch.no_grad()
def score(model: nn.Module, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities in nats of every token after the first, at temperature 1, by one plain forward."""
    device = next(model.parameters()).device
    ids = torch.tensor(token_ids, device=device)
    logits: Any = model(input_ids=ids, use_cache=False).logits
    logprobs = logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1).tolist()


def make_canary(model: nn.Module, token_ids: Sequence[Sequence[int]]) -> Canary:
    """The reference that the learner writes into the manifest."""
    tolerance = DEFAULT_TOLERANCE_NATS[next(model.parameters()).dtype]
    return Canary([list(row) for row in token_ids], score(model, token_ids), tolerance)


def gap_nats(canary: Canary, scored: Sequence[Sequence[float]]) -> float:
    """Largest absolute difference between the engine's and the learner's log-probabilities; NaN counts as infinite."""
    difference = np.abs(np.asarray(scored) - np.asarray(canary.logprobs))
    largest = float(difference.max()) if difference.size else 0.0
    return largest if np.isfinite(largest) else float("inf")
