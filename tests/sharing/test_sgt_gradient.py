"""The loss that the regime describes, on a tiny random model, against the method's formula."""

import numpy as np
import pytest
import torch

from mrl.objectives.clipped import clipped_surrogate
from mrl.objectives.imitation import imitation
from mrl.objectives.logprobs import token_logprobs


class Bigram(torch.nn.Module):
    """log pi(y_t | y_{t-1}): the smallest autoregressive model."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.embed = torch.nn.Parameter(torch.randn(vocab, 6, generator=generator, dtype=torch.float64))
        self.head = torch.nn.Parameter(torch.randn(vocab, 6, generator=generator, dtype=torch.float64))

    def logprobs(self, prompt, answer):
        context = torch.tensor(np.concatenate([prompt[-1:], answer[:-1]]), dtype=torch.long)
        targets = torch.tensor(answer, dtype=torch.long)
        return token_logprobs(self.embed[context], self.head, targets, temperature=1.0, chunk_tokens=3)


def loss_of(absorbed, components, model):
    """sum over components of coefficient / D * sum over rows and tokens of weight * term."""
    total = sum(parameter.sum() * 0 for parameter in model.parameters())
    for component in components:
        for row in (row for row in absorbed.examples if row.component == component.name):
            logprobs = model.logprobs(row.prompt_token_ids, row.answer_token_ids)
            term = imitation(logprobs)
            if component.objective == "policy_gradient":
                advantages = torch.from_numpy(row.advantages)
                term = clipped_surrogate(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
            scale = component.coefficient / absorbed.denominators[component.name]
            total = total + scale * (torch.from_numpy(row.weights.copy()) * term).sum()
    return total


def gradient(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize(("normaliser", "z"), [("rescues", 1), ("prompts", 2)])
def test_gradient_on_failed_groups_is_the_score_of_the_peer_answer(
    make_sgt, make_group, make_success, receiver, normaliser, z
):
    """All-failed groups have no policy gradient; what is left is (lambda / Z) times the mean score of y*, downhill."""
    model = Bigram(len(receiver.table.pieces))
    regime = make_sgt(lambda_=0.3, normaliser=normaliser)
    groups = [make_group([0, 0, 0, 0], "p"), make_group([0, 0, 0, 0], "q")]
    for group in groups:
        regime.asks(group)
    alone = regime.absorb(groups, [], step=0, rng=np.random.default_rng(0))
    assert all(not g.any() for g in gradient(loss_of(alone, regime.components, model), model))

    absorbed = regime.absorb(groups, [make_success()], step=0, rng=np.random.default_rng(0))
    found = gradient(loss_of(absorbed, regime.components, model), model)
    y = receiver.retokenize(b"reverse: yah", finished=True, max_tokens=64).token_ids
    log_pi = torch.log_softmax(model.embed @ model.head.T, dim=-1)
    steps = zip([3, *y[:-1].tolist()], y.tolist(), strict=True)
    mean_score = gradient(sum(log_pi[before, after] for before, after in steps) / len(y), model)
    for one, other in zip(found, mean_score, strict=True):
        torch.testing.assert_close(one, -(0.3 / z) * other, rtol=1e-4, atol=1e-6)
        assert other.abs().max() > 0.01


def test_left_out_rows_change_nothing(make_sgt, make_group, receiver):
    """Uniform groups, whose rows are left out, leave the mean over all rows of the batch as it is."""
    model = Bigram(len(receiver.table.pieces))
    regime = make_sgt()
    groups = [make_group([1, 0, 0]), make_group([1, 1, 1]), make_group([0, 0, 0])]
    found = loss_of(regime.absorb(groups, [], step=0, rng=np.random.default_rng(0)), regime.components, model)
    advantages = [2 / np.sqrt(3), -1 / np.sqrt(3), -1 / np.sqrt(3)]
    assert found.item() == pytest.approx(-sum(advantages) / 9, abs=1e-6)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for number, advantage in enumerate(advantages):
        ids = np.array([10 + number, 11, 12][: 2 + number % 2])
        score = gradient(model.logprobs(np.array([3]), ids).mean(), model)
        expected = [e - advantage * s / 9 for e, s in zip(expected, score, strict=True)]
    for one, other in zip(gradient(found, model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
