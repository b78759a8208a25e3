"""Texts are scored in any number of passes, whatever their lengths."""

import numpy as np
import pytest
import torch

from mrl.models.scoring import score_tokens

TEXTS = [[5, 9, 3], [7, 1, 2, 8, 30, 4, 4], [60, 2], [11, 12, 13, 14, 15]]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("max_logits", [1, 2 * 7 * 64, 1 << 26])
def test_texts_of_any_length_are_scored_as_each_alone(tiny_model, family, max_logits):
    """One in a pass, two, or all."""
    model = tiny_model(family)
    passes = []
    model.register_forward_hook(lambda _module, _inputs, output: passes.append(len(output.logits)))

    found = score_tokens(model, TEXTS, max_logits=max_logits)

    assert passes == {1: [1] * 4, 2 * 7 * 64: [2, 2]}.get(max_logits, [4])
    for text, scored in zip(TEXTS, found, strict=True):
        ids = torch.tensor([text])
        wanted = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        np.testing.assert_allclose(scored, wanted.detach().numpy(), atol=1e-5, rtol=0)
