"""The step from hidden states to logits in a family's head, beyond the product with its weight.

    z = softcap * tanh((W h / divisor) / softcap),   or W h / divisor where there is no softcap

The table below holds all that is known of families; a head that does something else is detected by
`mrl.learner.trainer.check_forward`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

DIVISORS: dict[str, Callable[[float], float]] = {
    "logits_scaling": lambda value: value,  # Granite divides by it
    "logit_scale": lambda value: 1.0 / value,  # Cohere multiplies with it
}
"""Key of a model's configuration -> function of its value that gives the divisor of the logits."""
SOFTCAP = "final_logit_softcapping"
"""Key of a model's configuration: bound of the logits' size (Gemma 2, arXiv 2408.00118)."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Operations of a head on the product of its weight and the hidden states."""

    divisor: float = 1.0
    softcap: float | None = None


def head_shape(model: nn.Module) -> HeadShape:
    """Return divisor and soft cap of a model's head, from its configuration."""
    config = model.config
    found = (rule(getattr(config, key)) for key, rule in DIVISORS.items() if getattr(config, key, None))
    return HeadShape(next(found, 1.0), getattr(config, SOFTCAP, None))
