"""Two softmax policies that learn many contexts side by side, one update per step, under each sharing method.

Only the order of the methods means something: the height of a curve depends on offsets and learning rate, which are
chosen here.

Shapes: R seeds, 2 policies, X contexts, K arms, G rows; `...` stands for the leading [R, 2, X].
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mrl.bandit.credit import Credit, Rows, Rules
from mrl.bandit.problem import Floats, softmax

Ints = npt.NDArray[np.intp]
Number = TypeVar("Number", np.intp, np.float64)


class Toy(NamedTuple):
    """Size and constants of the experiment."""

    contexts: int = 300
    arms: int = 50
    correct: int = 2
    group: int = 8
    steps: int = 300
    seeds: int = 3
    learning_rate: float = 1.0
    offset_mean: float = -0.5
    offset_std: float = 2.5
    """Mean and standard deviation of the offset of the correct arms' logits, drawn once per context and policy: it
    decides which policy finds which answers from the start."""
    residual_std_nats: float = 0.5
    rules: Rules = Rules()


class Curve(NamedTuple):
    """Mean success over contexts and policies, before the first step and after each one."""

    success_RS: Floats

    def after(self, step: int) -> float:
        """Return the mean over seeds after this many steps."""
        return float(self.success_RS[:, step].mean())


class Draws(NamedTuple):
    """Everything random in one step, for both policies."""

    arms: Ints
    residual_nats: Floats
    tickets: Floats


def train(toy: Toy, credit: Credit, seed: int) -> Curve:
    """Train both policies of every seed; the start depends on `seed` alone, so that methods begin equal."""
    rngs = [np.random.default_rng([seed, index]) for index in range(toy.seeds)]
    logits = np.stack([start_logits(toy, rng) for rng in rngs])
    success = [_success(toy, logits)]
    for _ in range(toy.steps):
        probs = softmax(logits)
        draws = Draws(*map(np.stack, zip(*(_draw(toy, *one) for one in zip(probs, rngs, strict=True)), strict=True)))
        logits += toy.learning_rate * directions(probs, draws, credit, toy)
        success.append(_success(toy, logits))
    return Curve(np.stack(success, axis=-1))


def start_logits(toy: Toy, rng: np.random.Generator) -> Floats:
    """Return [2, X, K] logits: standard normal, and an offset on the first arms, which are the correct ones."""
    logits: Floats = rng.standard_normal((2, toy.contexts, toy.arms))
    logits[..., : toy.correct] += rng.normal(toy.offset_mean, toy.offset_std, (2, toy.contexts, 1))
    return logits


def directions(probs: Floats, draws: Draws, credit: Credit, toy: Toy) -> Floats:
    """Return the ascent direction of every context, [..., K]: sum over rows of weight times score.

    Each policy learns from its own rows and from the other policy's, which stand on axis 1 in reverse order.
    """
    arms = _rows(draws.arms)
    peer_arms = _rows(draws.arms[:, ::-1])
    mine, theirs = _rows(probs), _rows(probs[:, ::-1])
    ratio = _at(mine, peer_arms) / _at(theirs, peer_arms) * np.exp(_rows(draws.residual_nats))
    rewards = (arms < toy.correct).astype(np.float64), (peer_arms < toy.correct).astype(np.float64)
    weights = credit(Rows(*rewards, ratio, _rows(draws.tickets)), toy.rules)
    played = np.concatenate([arms, peer_arms], axis=1)
    return _weighted_scores(mine, played, np.concatenate(weights, axis=1)).reshape(probs.shape)


def train_all(toy: Toy, credits_by_name: dict[str, Credit], seed: int) -> dict[str, Curve]:
    """Return one curve per method, all from the same start."""
    return {name: train(toy, credit, seed) for name, credit in credits_by_name.items()}


def _draw(toy: Toy, probs: Floats, rng: np.random.Generator) -> Draws:
    """Draw one step of one seed; arms are drawn by inverting the cumulative distribution."""
    shape = (*probs.shape[:-1], toy.group)
    cumulative = probs.cumsum(axis=-1)
    points = rng.random(shape) * cumulative[..., -1:]
    arms = _inverted(_rows(cumulative), _rows(points)).reshape(shape)
    return Draws(arms, rng.normal(0.0, toy.residual_std_nats, shape), rng.random(shape))


def _inverted(cumulative_XK: Floats, points_XG: Floats) -> Ints:
    """Return the first arm whose cumulative probability exceeds the point: one search over rows laid end to end."""
    num_rows, num_arms = cumulative_XK.shape
    rows = np.arange(num_rows)[:, None]
    # Row x occupies [2x, 2x + 1], so that rounding of a sum that ends near 1 never reaches the next row.
    flat = (cumulative_XK + 2.0 * rows).ravel()
    found = np.searchsorted(flat, (points_XG + 2.0 * rows).ravel(), side="right").reshape(points_XG.shape)
    arms_XG: Ints = np.clip(found - rows * num_arms, 0, num_arms - 1)
    return arms_XG


def _weighted_scores(probs_XK: Floats, arms_XG: Ints, weights_XG: Floats) -> Floats:
    num_rows, num_arms = probs_XK.shape
    places = (arms_XG + np.arange(num_rows)[:, None] * num_arms).ravel()
    played_XK = np.bincount(places, weights_XG.ravel(), minlength=num_rows * num_arms).reshape(num_rows, num_arms)
    result: Floats = played_XK - weights_XG.sum(axis=1, keepdims=True) * probs_XK
    return result


def _at(probs_XK: Floats, arms_XG: Ints) -> Floats:
    return np.take_along_axis(probs_XK, arms_XG, axis=1)


def _rows(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return [R, 2, X, .] as [R 2 X, .]."""
    return values.reshape(-1, values.shape[-1])


def _success(toy: Toy, logits: Floats) -> Floats:
    """Return the mean probability of the correct arms over policies and contexts, [R]."""
    success_R: Floats = softmax(logits)[..., : toy.correct].sum(axis=-1).mean(axis=(1, 2))
    return success_R


def table_steps(toy: Toy) -> Sequence[int]:
    """Return the steps at which the table reads the curves: early and at the end."""
    return (toy.steps // 6, toy.steps)
