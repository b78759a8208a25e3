"""Advantages from the rewards of one group.

Shapes: G answers of one group.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Float32s: TypeAlias = npt.NDArray[np.float32]
Float64s: TypeAlias = npt.NDArray[np.float64]
Rewards: TypeAlias = Sequence[float] | npt.NDArray[np.floating]
AdvantageKind = Literal["group_std", "group_mean"]

EPS = 1e-6


def group_advantages(
    rewards_G: Rewards, kind: AdvantageKind = "group_std", *, std_correction: Literal[0, 1] = 1
) -> Float32s:
    """Return group-relative advantages.

        group_std   A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with `std_correction` GRPO (arXiv 2402.03300, 4.1.2)
        group_mean  A_i = r_i - mean(r)                                                Dr.GRPO (arXiv 2503.20783)

    A group of equal rewards, and a group of one, give exact zeros: they say nothing about which answer was better.
    verl takes mean 0 and deviation 1 for a group of one; its advantage is the reward there, without a baseline.
    Returns [G] float32.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if len(rewards) < 2 or np.all(rewards == rewards[0]):
        return np.zeros(len(rewards), dtype=np.float32)
    return against(rewards, rewards.mean(), rewards.std(ddof=std_correction) if kind == "group_std" else None)


def against(rewards_G: Rewards, baseline: float, std: float | None) -> Float32s:
    """Return [G] float32 advantages (r_i - baseline) / (std + 1e-6). Without a std they are not divided."""
    centred = np.asarray(rewards_G, dtype=np.float64) - baseline
    advantages: Float32s = (centred if std is None else centred / (std + EPS)).astype(np.float32)
    return advantages


def overlong_penalties(lengths_G: Sequence[int], *, max_tokens: int | Sequence[int], buffer_tokens: int) -> Float64s:
    """Return the reward that overlong answers lose (DAPO, arXiv 2503.14476, eq. 13).

    An answer is overlong when it reaches into the last `buffer_tokens` before `max_tokens`, its own of [G] if so many
    are given. It loses

        min(-(length - (max - buffer)) / buffer, 0)

    Returns [G], from 0 down to -1 at the limit.
    """
    into = np.asarray(lengths_G, dtype=np.float64) - (np.asarray(max_tokens) - buffer_tokens)
    penalties: Float64s = np.minimum(-into / buffer_tokens, 0.0)
    return penalties
