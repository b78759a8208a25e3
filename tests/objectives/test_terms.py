"""The table of terms."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from mrl.objectives.specs import Clipped, Distilled, Filtered, Grafted, Term
from mrl.objectives.terms import TERMS, term_losses

WRAPPED = {Grafted: Grafted(Clipped()), Filtered: Filtered(Clipped(), 0.5), Distilled: Distilled(Clipped())}
SPECS = [WRAPPED[kind] if kind in WRAPPED else kind() for kind in get_args(Term)]


def test_every_spec_has_a_function():
    """No term that a regime may name is without its numbers."""
    assert set(TERMS) == set(get_args(Term))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_component_without_tokens_gives_an_empty_loss(spec, make_inputs):
    """Its sum is an exact 0 that the backward pass can use."""
    inputs = make_inputs()
    empty = {name: getattr(inputs, name)[:0] for name in inputs.__slots__ if name not in ("update_index", "units")}
    losses = term_losses(spec, replace(inputs, **empty))
    assert losses.shape == (0,)
    assert losses.sum() == 0
    losses.sum().backward()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_rows_do_not_see_each_other(spec, make_inputs):
    """A microbatch that holds only some of the rows gives each its value: batches may be split between rows."""
    inputs = make_inputs(constant_behaviour=True)
    whole = term_losses(spec, inputs)
    for part in (inputs.row_T % 2 == 0, inputs.row_T % 2 == 1):
        rows = torch.unique(inputs.row_T[part], return_inverse=True)[1]
        others = ("update_index", "row_T", "units")
        split = {name: getattr(inputs, name)[part] for name in inputs.__slots__ if name not in others}
        torch.testing.assert_close(
            term_losses(spec, replace(inputs, row_T=rows, **split)), whole[part], rtol=1e-12, atol=0
        )
