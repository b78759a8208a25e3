"""Which function computes which term: the one place where specs become numbers.

Shapes: T tokens.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mrl.objectives.cispo import cispo
from mrl.objectives.clipped import clipped
from mrl.objectives.cross_sequence import cross_sequence
from mrl.objectives.dppo import dppo
from mrl.objectives.grafted import grafted
from mrl.objectives.imitation import imitation
from mrl.objectives.inputs import TermInputs
from mrl.objectives.shaped import shaped
from mrl.objectives.specs import (
    Cispo,
    Clipped,
    CrossSequence,
    Dppo,
    Grafted,
    Imitation,
    Shaped,
    Term,
    Trrd,
)
from mrl.objectives.trrd import trrd

TERMS: dict[type[Any], Callable[[Any, TermInputs], Tensor]] = {
    Clipped: clipped,
    Cispo: cispo,
    Dppo: dppo,
    Imitation: imitation,
    CrossSequence: cross_sequence,
    Grafted: grafted,
    Trrd: trrd,
    Shaped: shaped,
}
"""Spec -> its function, which takes the spec and the tokens of one component and returns [T] losses."""


def term_losses(spec: Term, inputs: TermInputs) -> Tensor:
    """Per-token loss of one component, unweighted and unnormalised; gradient through `inputs.logprobs_T` only. [T]."""
    return TERMS[type(spec)](spec, inputs)
