"""Weights of rows from rewards, for each method of the toy: the only place where the methods differ.

Shapes: X prompts (contexts of all seeds and both policies), G own rows, the same number of peer rows, K arms.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mrl.bandit.problem import Floats

EPS = 1e-6


class Rules(NamedTuple):
    """Constants of the update."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    lambda_: float = 0.1


class Rows(NamedTuple):
    """Data of one step that one policy sees."""

    own_rewards_XG: Floats
    peer_rewards_XG: Floats
    peer_ratio_XG: Floats
    """pi(a) / mu(a) of peer rows times e^xi: the ratio that a learner reads after alignment."""
    tickets_XG: Floats
    """Uniform numbers in [0, 1) that choose among the peer's successes."""


class Weights(NamedTuple):
    """Coefficient of the score of every row."""

    own_XG: Floats
    peer_XG: Floats


Credit = Callable[[Rows, Rules], Weights]


def standardised(rewards_XG: Floats, all_XG: Floats) -> Floats:
    """Return (r - mean) / (std + eps) with mean and std (correction 1) of `all_XG`; uniform rewards give zero."""
    mean_X1 = all_XG.mean(axis=1, keepdims=True)
    result: Floats = (rewards_XG - mean_X1) / (all_XG.std(axis=1, ddof=1, keepdims=True) + EPS)
    return result


def grpo(rows: Rows, rules: Rules) -> Weights:
    """Weigh own rows only: A_i / G."""
    advantages_XG = standardised(rows.own_rewards_XG, rows.own_rewards_XG)
    return Weights(advantages_XG / advantages_XG.shape[1], np.zeros_like(rows.peer_rewards_XG))


def xgrpo(rows: Rows, rules: Rules) -> Weights:
    """Weigh own rows only, with mean and std over both groups."""
    advantages_XG = standardised(rows.own_rewards_XG, _both(rows))
    return Weights(advantages_XG / advantages_XG.shape[1], np.zeros_like(rows.peer_rewards_XG))


def sgt(rows: Rows, rules: Rules) -> Weights:
    """Weigh own rows as GRPO, and one peer success by lambda where the own group failed as a whole."""
    own_XG = grpo(rows, rules).own_XG
    tickets_XG = rows.tickets_XG * rows.peer_rewards_XG
    chosen_XG = (tickets_XG == tickets_XG.max(axis=1, keepdims=True)) & (tickets_XG > 0)
    failed_X1 = rows.own_rewards_XG.sum(axis=1, keepdims=True) == 0
    return Weights(own_XG, rules.lambda_ * (chosen_XG & failed_X1))


def prp_recompute(rows: Rows, rules: Rules) -> Weights:
    """Weigh both groups as if they were own: ratio 1 on every row."""
    return _pooled(rows, np.ones_like(rows.peer_ratio_XG))


def prp_behaviour(rows: Rows, rules: Rules) -> Weights:
    """Weigh peer rows by the clipped ratio: gradient of min(rho A, clip(rho) A), which is rho A or nothing."""
    rising_XG = rows.peer_rewards_XG > _both(rows).mean(axis=1, keepdims=True)
    ratio_XG = rows.peer_ratio_XG
    kept_XG = np.where(rising_XG, ratio_XG <= 1 + rules.clip_high, ratio_XG >= 1 - rules.clip_low)
    return _pooled(rows, ratio_XG * kept_XG)


def _pooled(rows: Rows, ratio_XG: Floats) -> Weights:
    both = _both(rows)
    own_XG, peer_XG = (standardised(rewards_XG, both) for rewards_XG in rows[:2])
    return Weights(own_XG / both.shape[1], peer_XG * ratio_XG / both.shape[1])


def _both(rows: Rows) -> Floats:
    return np.concatenate([rows.own_rewards_XG, rows.peer_rewards_XG], axis=1)


CREDITS: dict[str, Credit] = {
    "GRPO": grpo,
    "XGRPO": xgrpo,
    "SGT": sgt,
    "PRP behaviour": prp_behaviour,
    "PRP recompute": prp_recompute,
}
"""Every method of the toy, by the name that table and picture show."""
