"""The canary: fixed sequences that tell whether an engine serves the weights that the learner published."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from mrl.models.scoring import score_tokens
from mrl.weights.manifest import Canary

TOLERANCE_NATS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
"""By the coarser of the number formats of learner and engine."""


def canary_sequences(
    vocab_size: int, *, num_sequences: int = 4, num_tokens: int = 16, seed: int = 0
) -> list[list[int]]:
    """Random token ids, the same for the same arguments: [num_sequences][num_tokens]."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, size=(num_sequences, num_tokens))
    return [[int(token) for token in row] for row in ids]


def make_canary(model: nn.Module, token_ids: Sequence[Sequence[int]], precision: str = "") -> Canary:
    """The reference that the learner writes into the manifest.

    `precision` is the number format of the model's forward passes, where that is not the one of its parameters.
    """
    tolerance = TOLERANCE_NATS[precision or str(next(model.parameters()).dtype).removeprefix("torch.")]
    return Canary([list(row) for row in token_ids], score_tokens(model, token_ids), tolerance)


@dataclass(frozen=True, slots=True)
class CanaryGap:
    """Absolute differences between an engine's and the learner's log-probabilities, in nats; NaN counts as infinite."""

    mean_nats: float
    max_nats: float


def gap_nats(canary: Canary, scored: Sequence[Sequence[float]]) -> CanaryGap:
    """How far an engine's scores are from the reference. Raises ValueError when the shapes differ."""
    difference = np.abs(np.asarray(scored) - np.asarray(canary.logprobs))
    if not np.isfinite(difference).all():
        return CanaryGap(float("inf"), float("inf"))
    return CanaryGap(float(difference.mean()), float(difference.max()))
