"""Numbers to look at while training. None carries gradient; all are per token, so that the caller can sum over ranks.

Shapes: T tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mrl.objectives.ratios import bounded_ratio
from mrl.objectives.specs import Cispo, Clipped, Distilled, Dppo, Filtered, Grafted, Term, Trrd
from mrl.objectives.terms import TermInputs, distilled_advantages, term_losses


@torch.no_grad()
def k3_nats(logprobs_T: Tensor, sampled_logprobs_T: Tensor) -> Tensor:
    """Return a per-token estimate of KL(sampler || policy) on tokens that the sampler drew; never negative.

        k3_t = exp(d_t) - d_t - 1,   d_t = log pi(y_t) - log q(y_t)

    Its mean over tokens drawn from q is unbiased (J. Schulman, "Approximating KL divergence", 2020). Returns [T].
    """
    difference_T = logprobs_T - sampled_logprobs_T
    return bounded_ratio(logprobs_T, sampled_logprobs_T) - difference_T - 1


def clipped_tokens(spec: Term, inputs: TermInputs) -> Tensor:
    """Return which tokens have an advantage and no gradient, because of the term's clip, mask or clamp.

    Read off the gradient itself, so that it is right for every term. Weights outside the clip (corrections, GRAFT's
    gate, F-TIS's filter) and DPPO's penalty are left aside; tokens with units have no clip. Returns [T] bool.
    """
    with torch.enable_grad():
        logprobs_T = inputs.logprobs_T.detach().requires_grad_()
        losses_T = term_losses(_bare(spec), replace(inputs, logprobs_T=logprobs_T, units=None))
        (gradient_T,) = torch.autograd.grad(losses_T.sum(), logprobs_T)
    advantages_T = distilled_advantages(spec, inputs) if isinstance(spec, Distilled) else inputs.advantages_T
    is_clipped_T = (gradient_T == 0) & (advantages_T != 0)
    return is_clipped_T if inputs.units is None else is_clipped_T & ~inputs.units.are_there


@torch.no_grad()
def sampled_entropy_nats(logprobs_T: Tensor) -> Tensor:
    """Return the surprisal of the sampled tokens; its mean over a policy's own samples estimates the entropy. Returns
    [T].
    """
    return -logprobs_T


def _bare(spec: Term) -> Term:
    """Return the term without the weights and penalties outside its clip."""
    match spec:
        case Clipped() | Cispo() | Trrd():
            return replace(spec, correction=None)
        case Distilled():
            return replace(spec, clipped=replace(spec.clipped, correction=None))
        case Dppo():
            return replace(spec, penalty=0.0)
        case Grafted() | Filtered():
            return _bare(spec.clipped)
        case _:
            return spec
