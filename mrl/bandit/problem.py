"""One prompt as a bandit: the probabilities of arms under learner and peer, and the correct arms.

Shapes: K arms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mrl.errors import ConfigError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

REFERENCE_LEARNER_LOGITS = (-2.37427, -2.632105, 0.640423, 0.1049, -0.535669, 0.361595, 1.304, 0.947081)
REFERENCE_PEER_LOGITS = (-0.192615, -0.585795, -0.436292, 0.028928, -1.627522, -0.153154, -0.872138, -0.512587)
REFERENCE_CORRECT = (0, 1)
REFERENCE_RESIDUAL_NATS = (0.3, -0.2, 0.1, -0.1, 0.25, -0.3, 0.05, -0.15)
"""Residual that alignment adds to the log-ratio of each arm of the reference instance, in nats."""


@dataclass(frozen=True, eq=False)
class Bandit:
    """A learner `pi_K`, a peer `mu_K`, and the set C of correct arms as `correct_K`.

    Raises ConfigError when an arm has no probability, a distribution does not sum to 1, or C is empty or everything:
    the formulas divide by p, 1 - p and mu.
    """

    pi_K: Floats
    mu_K: Floats
    correct_K: Bools

    def __post_init__(self) -> None:
        for name, probs_K in (("learner", self.pi_K), ("peer", self.mu_K)):
            if not (np.all(probs_K > 0) and abs(probs_K.sum() - 1) < 1e-9):
                raise ConfigError(
                    "not a probability distribution over all arms", where=f"bandit {name}", got=probs_K.tolist()
                )
        if not 0 < self.correct_K.sum() < len(self.correct_K):
            raise ConfigError("some arms, but not all, must be correct", where="bandit", got=self.correct_K.tolist())

    @cached_property
    def p(self) -> float:
        """Success of the learner, pi(C)."""
        return float(self.pi_K[self.correct_K].sum())

    @cached_property
    def q(self) -> float:
        """Success of the peer, mu(C)."""
        return float(self.mu_K[self.correct_K].sum())

    @cached_property
    def rewards(self) -> Floats:
        """Rewards, [K]: 1 on correct arms, 0 elsewhere."""
        return self.correct_K.astype(np.float64)

    @cached_property
    def ratio(self) -> Floats:
        """Density ratio w = pi / mu, [K]."""
        return self.pi_K / self.mu_K

    @cached_property
    def scores(self) -> Floats:
        """Scores, [K, K]; row a is s(a) = grad log pi_a = e_a - pi."""
        return np.eye(len(self.pi_K)) - self.pi_K

    @cached_property
    def score_squares(self) -> Floats:
        """||s(a)||^2 = 1 - 2 pi_a + ||pi||^2, [K]."""
        return 1 - 2 * self.pi_K + self.pi_K @ self.pi_K

    @cached_property
    def direction(self) -> Floats:
        """grad log p = pi_C - pi, [K]: the direction in which the learner's success grows fastest."""
        return restricted(self.pi_K, self.correct_K) - self.pi_K

    @cached_property
    def gradient(self) -> Floats:
        """g* = grad p = p (pi_C - pi), [K]: the mean of an unbiased estimator."""
        return self.p * self.direction


def softmax(logits: npt.ArrayLike) -> Floats:
    """Return softmax probabilities over the last axis."""
    logits = np.asarray(logits, dtype=np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probs: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return probs


def restricted(probs_K: Floats, keep_K: Bools) -> Floats:
    """Return the distribution given that the arm is in a set, zero outside."""
    kept_K = np.where(keep_K, probs_K, 0.0)
    result: Floats = kept_K / kept_K.sum()
    return result


def make_bandit(learner_logits: Sequence[float], peer_logits: Sequence[float], correct: Sequence[int]) -> Bandit:
    """Make a bandit of two softmax policies; `correct` lists the correct arms."""
    return Bandit(
        softmax(learner_logits), softmax(peer_logits), np.isin(np.arange(len(learner_logits)), np.asarray(correct))
    )


def reference_bandit() -> Bandit:
    """Return the instance of the printed table: 8 arms, 2 correct; the learner hardly ever finds them, the peer often
    does.
    """
    return make_bandit(REFERENCE_LEARNER_LOGITS, REFERENCE_PEER_LOGITS, REFERENCE_CORRECT)
