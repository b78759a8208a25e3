"""Advantages from the rewards of one group.

Shapes: G answers of one group.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def grpo_advantages(
    rewards_G: Sequence[float] | npt.NDArray[np.floating], *, eps: float = 1e-6
) -> npt.NDArray[np.float32]:
    """Group-relative advantages of GRPO (arXiv 2402.03300, section 4.1.2).

        A_i = (r_i - mean(r)) / (std(r) + eps),   std with correction 1

    A group of equal rewards, and a group of one, give exact zeros: they say nothing about which answer was better.
    Returns [G] float32.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if len(rewards) < 2 or np.all(rewards == rewards[0]):
        return np.zeros(len(rewards), dtype=np.float32)
    centred = rewards - rewards.mean()
    advantages: npt.NDArray[np.float32] = (centred / (rewards.std(ddof=1) + eps)).astype(np.float32)
    return advantages
