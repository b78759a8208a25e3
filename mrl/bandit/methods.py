"""The methods of the study, each with its closed form and its Monte Carlo twin. Table and pictures read this list."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mrl.bandit import closed_forms, sampled
from mrl.bandit.moments import Moments
from mrl.bandit.problem import REFERENCE_RESIDUAL_NATS, Bandit, Floats


class Settings(NamedTuple):
    """Constants of the estimators; the defaults are those of the reference instance."""

    group: int = 4
    peer_group: int = 4
    lambda_: float = 0.1
    """Coefficient of SGT's rescue term."""
    cap: float = 1.5
    """Largest density ratio of truncated PRP."""
    peer_weight: float = 0.5
    """Weight of the peer's mean in XGRPO's pooled baseline."""
    residual_nats: tuple[float, ...] = REFERENCE_RESIDUAL_NATS
    """Residual that alignment adds to the log-ratio of each arm, in nats."""

    @property
    def residual(self) -> Floats:
        """The residual as an array, [K]."""
        return np.array(self.residual_nats)


class Method(NamedTuple):
    """A method: its closed form and its estimator. PRP with a ratio and GRPO with a fixed baseline use b = p, PRP
    recompute b = q.
    """

    name: str
    shares: str
    """Data that cross from the peer to the learner, in a word or two."""
    closed: Callable[[Bandit, Settings], Moments]
    estimator: Callable[[Bandit, Settings], sampled.Estimator]


METHODS: tuple[Method, ...] = (
    Method(
        "GRPO",
        "nothing",
        lambda bandit, s: closed_forms.grpo_mean_baseline(bandit, s.group),
        lambda bandit, s: sampled.own_rows(0.0),
    ),
    Method(
        "GRPO, fixed b",
        "nothing",
        lambda bandit, s: closed_forms.grpo_fixed_baseline(bandit, s.group, bandit.p),
        lambda bandit, s: sampled.own_rows_fixed(bandit.p),
    ),
    Method(
        "XGRPO pooled",
        "rewards",
        lambda bandit, s: closed_forms.xgrpo_pooled(bandit, s.group, s.peer_group, s.peer_weight),
        lambda bandit, s: sampled.own_rows(s.peer_weight),
    ),
    Method(
        "XGRPO peer-only",
        "rewards",
        lambda bandit, s: closed_forms.xgrpo_peer_only(bandit, s.group, s.peer_group),
        lambda bandit, s: sampled.own_rows(1.0),
    ),
    Method(
        "SGT",
        "one success",
        lambda bandit, s: closed_forms.sgt(bandit, s.group, s.peer_group, s.lambda_),
        lambda bandit, s: sampled.rescued_rows(s.lambda_),
    ),
    Method(
        "PRP exact",
        "answers",
        lambda bandit, s: closed_forms.prp_exact(bandit, s.peer_group, bandit.p),
        lambda bandit, s: sampled.peer_rows(bandit.ratio, bandit.p),
    ),
    Method(
        "PRP truncated",
        "answers",
        lambda bandit, s: closed_forms.prp_truncated(bandit, s.peer_group, bandit.p, s.cap),
        lambda bandit, s: sampled.peer_rows(np.minimum(bandit.ratio, s.cap), bandit.p),
    ),
    Method(
        "PRP residual",
        "answers",
        lambda bandit, s: closed_forms.prp_residual(bandit, s.peer_group, bandit.p, s.residual),
        lambda bandit, s: sampled.peer_rows(bandit.ratio * np.exp(s.residual), bandit.p),
    ),
    Method(
        "PRP recompute",
        "answers",
        lambda bandit, s: closed_forms.prp_recompute(bandit, s.peer_group),
        lambda bandit, s: sampled.peer_rows(np.ones_like(bandit.pi_K), bandit.q),
    ),
)

MAIN = ("GRPO", "XGRPO pooled", "SGT", "PRP exact", "PRP truncated", "PRP recompute")
"""Names of the methods that the sweeps show."""


def method_named(name: str) -> Method:
    """Return a method by name. Raises StopIteration for a name that is not in the list."""
    return next(method for method in METHODS if method.name == name)


class Row(NamedTuple):
    """One line of the table of the reference instance."""

    name: str
    shares: str
    support: float
    variance: float
    bias: float
    measured: sampled.Measured


def reference_rows(bandit: Bandit, settings: Settings, num_draws: int, seed: int) -> list[Row]:
    """Return the rows of the table: closed forms beside Monte Carlo, every method on the same draws."""
    rng = np.random.default_rng(seed)
    groups = sampled.draw_groups(bandit, num_draws, settings.group, settings.peer_group, rng)
    rows = []
    for method in METHODS:
        moments = method.closed(bandit, settings)
        measured = sampled.measure(bandit, method.estimator(bandit, settings), groups, rng)
        place = moments.support(bandit), moments.variance, moments.bias(bandit)
        rows.append(Row(method.name, method.shares, *place, measured))
    return rows
