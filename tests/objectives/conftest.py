"""Tokens that cross every threshold, and the comparison of a term with a slow twin."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import NamedTuple

import pytest
import torch

from mrl.objectives.specs import Term
from mrl.objectives.terms import TermInputs, term_losses

# Log-ratios below, inside and above every clip, and beyond the exponents' bounds.
EDGES = [math.log(edge) for edge in (0.5, 0.8, 0.9997, 1.0004, 1.2, 1.28)]
LOG_RATIOS = [-30.0, 0.0, math.log(2.5), math.log(9), 30.0]
LOG_RATIOS += [edge + side for edge in EDGES for side in (-1e-4, 1e-4)]
BEHAVIOUR_GAPS = [0.0, math.log(0.3), -25.0, math.log(4.99), math.log(5.01), 25.0, 0.4]
TEACHER_GAPS = [0.5, -0.5, 1.7, -1.7, float("nan"), 0.05, -0.01]
ADVANTAGES = [-1.3, 0.0, 0.7]
STEP = 1e-6


class Row(NamedTuple):
    """The tokens of one row as plain numbers, in the papers' notation."""

    lp: list[float]
    prox: list[float]
    mu: list[float]
    teacher: list[float]
    a: list[float]


Twin = Callable[[Row, Row, int], list[float]]
"""(row, the same row where every stop-gradient is taken, updates made) -> loss of each token."""


@pytest.fixture
def make_inputs() -> Callable[..., TermInputs]:
    """float64 tokens of rows of 1 and of 4 tokens whose log-ratios cross every edge, at every sign of the advantage.

    The tokens of a row do not lie together. `constant_behaviour` gives a row one behaviour value, as cross terms do.
    """

    def make(*, constant_behaviour: bool = False, update_index: int = 0) -> TermInputs:
        generator = torch.Generator().manual_seed(5)
        columns: list[list[float]] = [[] for _ in range(6)]
        cases = [(d, a) for d in LOG_RATIOS for a in ADVANTAGES]
        for row, (shift, advantage) in enumerate(cases * 2):
            length = 1 if row < len(cases) else 4
            jitter = torch.randn(length, generator=generator).double()
            proximal = -0.3 - 3 * torch.rand(length, generator=generator).double()
            ratio = shift + 0.1 * (jitter - jitter.mean())
            gap = [BEHAVIOUR_GAPS[(row + t * (not constant_behaviour)) % 7] for t in range(length)]
            teacher = [TEACHER_GAPS[(row + t) % 7] for t in range(length)]
            for t in range(length):
                now, then = float(proximal[t] + ratio[t]), float(proximal[t])
                source = float(proximal.mean() + ratio.mean() - shift) - 0.3 * shift if constant_behaviour else then
                for column, value in zip(
                    columns, (now, then, source - gap[t], advantage, row, now - teacher[t]), strict=True
                ):
                    column.append(value)
        order = torch.randperm(len(columns[0]), generator=generator)
        tensors = [torch.tensor(column, dtype=torch.float64)[order] for column in columns]
        now, then, source, advantages, rows, teachers = tensors
        for tensor in (now, then, source, advantages, teachers):
            tensor.requires_grad_()
        return TermInputs(now, then, source, advantages, rows.long(), teachers, update_index)

    return make


def rows_of(inputs: TermInputs) -> tuple[list[Row], list[list[int]]]:
    """The rows as numbers, and the places of their tokens."""
    places = [
        [i for i, r in enumerate(inputs.row_T.tolist()) if r == row] for row in range(int(inputs.row_T.max()) + 1)
    ]
    tensors = (inputs.logprobs_T, inputs.proximal_T, inputs.behaviour_T, inputs.teacher_T, inputs.advantages_T)
    columns = [tensor.tolist() for tensor in tensors]
    return [Row(*([column[i] for i in mine] for column in columns)) for mine in places], places


def moved(row: Row, token: int, by: float) -> Row:
    """The row with one log-probability of the policy in training changed."""
    return row._replace(lp=[lp + by * (t == token) for t, lp in enumerate(row.lp)])


def slope(before: Sequence[float], after: Sequence[float]) -> float:
    """Of the mean over a row; tokens that did not change add exactly nothing, however large they are."""
    return sum(b - a for a, b in zip(before, after, strict=True)) / len(before) / STEP


@pytest.fixture
def check_term() -> Callable[[Term, Twin, TermInputs], None]:
    """Compare a term with its twin: values, gradients, and who has none.

    The gradient of the row means lies between the twin's difference quotients to both sides: on a smooth place it is
    both of them, at the edge of a clip one of the two or between.
    """

    def check(spec: Term, twin: Twin, inputs: TermInputs) -> None:
        rows, places = rows_of(inputs)
        losses = term_losses(spec, inputs)
        expected, weights, left, right = (torch.zeros_like(losses) for _ in range(4))
        for row, mine in zip(rows, places, strict=True):
            expected[mine] = torch.tensor(twin(row, row, inputs.update_index), dtype=torch.float64)
            weights[mine] = 1 / len(mine)
            for t, place in enumerate(mine):
                below, here, above = (twin(moved(row, t, by), row, inputs.update_index) for by in (-STEP, 0.0, STEP))
                left[place], right[place] = slope(below, here), slope(here, above)
        torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-13)
        (losses * weights).sum().backward()
        found = inputs.logprobs_T.grad
        # Rounding of a large value, and the curvature over one step.
        slack = 1e-8 * expected.abs().clamp(min=1) + 3 * STEP * torch.maximum(left.abs(), right.abs())
        wrong = (found < torch.minimum(left, right) - slack) | (found > torch.maximum(left, right) + slack)
        assert list(zip(found[wrong].tolist(), left[wrong].tolist(), right[wrong].tolist(), strict=True)) == []
        assert found.any()
        others = {field.name for field in fields(inputs)} - {"logprobs_T", "row_T", "update_index", "units"}
        assert {name: getattr(inputs, name).grad for name in others} == dict.fromkeys(others)

    return check


@pytest.fixture
def gradient() -> Callable[[Term, TermInputs], torch.Tensor]:
    """[T] gradient of the summed term with respect to the policy's log-probabilities."""

    def compute(spec: Term, inputs: TermInputs) -> torch.Tensor:
        return torch.autograd.grad(term_losses(spec, inputs).sum(), inputs.logprobs_T)[0]

    return compute
