"""The canary: fixed sequences that tell whether an engine serves the weights that the learner published."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from mrl.models.scoring import score_tokens
from mrl.weights.manifest import Canary

DEFAULT_TOLERANCE_NATS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def canary_sequences(
    vocab_size: int, *, num_sequences: int = 4, num_tokens: int = 16, seed: int = 0
) -> list[list[int]]:
    """Random token ids, the same for the same arguments: [num_sequences][num_tokens]."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, size=(num_sequences, num_tokens))
    return [[int(token) for token in row] for row in ids]


def make_canary(model: nn.Module, token_ids: Sequence[Sequence[int]]) -> Canary:
    """The reference that the learner writes into the manifest."""
    tolerance = DEFAULT_TOLERANCE_NATS[next(model.parameters()).dtype]
    return Canary([list(row) for row in token_ids], score_tokens(model, token_ids), tolerance)


def gap_nats(canary: Canary, scored: Sequence[Sequence[float]]) -> float:
    """Largest absolute difference between the engine's and the learner's log-probabilities; NaN counts as infinite."""
    difference = np.abs(np.asarray(scored) - np.asarray(canary.logprobs))
    largest = float(difference.max()) if difference.size else 0.0
    return largest if np.isfinite(largest) else float("inf")
