"""The variants of SGT that the science programme compared: each is SGT but for one thing."""

import math

import pytest
import torch
from science_variants import LIKELY, LIKELY_3, SHAPED, STAYING

from mrl.objectives.terms import TermInputs, term_losses
from mrl.sharing.sgt import RESCUE, SgtParameters

LOGPROBS = [-0.5, -1.5, -3.0]


def gradient_of(regime) -> list[float]:
    """Gradient of a rescue's three tokens, before the row's own weights, beside SGT's -1 for each."""
    (component,) = (one for one in regime.components if one.name == RESCUE)
    logprobs_T = torch.tensor(LOGPROBS, requires_grad=True)
    inputs = TermInputs(
        logprobs_T=logprobs_T,
        proximal_T=logprobs_T.detach(),
        behaviour_T=torch.zeros(3),
        advantages_T=torch.ones(3),
        row_T=torch.zeros(3, dtype=torch.int64),
        teacher_T=torch.full((3,), math.nan),
    )
    (component.coefficient * term_losses(component.term, inputs)).sum().backward()
    assert logprobs_T.grad is not None
    return logprobs_T.grad.tolist()


def slope(logprob: float) -> float:
    """p f'(p) of f(p) = p / (p + 0.1)."""
    p = math.exp(logprob)
    return 0.1 * p / (p + 0.1) ** 2


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        (LIKELY, [math.exp(sum(LOGPROBS) / 3)] * 3),
        (LIKELY_3, [3 * math.exp(sum(LOGPROBS) / 3)] * 3),
        (SHAPED, [4 * slope(one) for one in LOGPROBS]),
    ],
)
def test_rescues_weigh_by_the_policys_own_probability(
    make_context, make_sgt, make_group, make_success, step_of, kind, weights
):
    """The rows are those of SGT, and so are their weights over tokens; the term has the probability."""
    groups, received = [make_group([0, 0], "failed"), make_group([0, 1])], [make_success(prompt_id="failed")]
    variant = kind.build(SgtParameters(**{"lambda": 0.5}), make_context())
    assert gradient_of(variant) == pytest.approx([-0.5 * one for one in weights])
    sgt, found = step_of(make_sgt(), groups, received), step_of(variant, groups, received)
    assert found.denominators == sgt.denominators
    for old, new in zip(sgt.examples, found.examples, strict=True):
        assert old.answer_token_ids.tolist() == new.answer_token_ids.tolist()
        assert old.weights.tolist() == new.weights.tolist()
        assert new.advantages.tolist() == (
            [1.0] * len(new.advantages) if new.component == RESCUE else old.advantages.tolist()
        )


def test_a_prompt_is_rescued_once_it_stays_failed(make_context, make_group):
    """The second failure on a prompt asks, also in a run that goes on; a success in between starts anew."""
    regime = STAYING.build(SgtParameters(), make_context())
    assert regime.asks(make_group([0, 0], "p")) == []
    resumed = STAYING.build(SgtParameters(), make_context())
    resumed.restore(regime.state())
    assert regime.asks(make_group([0, 1], "p")) == []
    assert regime.asks(make_group([0, 0], "p")) == []
    assert resumed.asks(make_group([0, 0], "p")) == ["p"]
    assert resumed.awaited() == ["p"]
