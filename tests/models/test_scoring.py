"""Texts are scored in any number of passes, whatever their lengths."""

import numpy as np
import pytest
import torch

from mrl.models.scoring import beside_likeliest, score_tokens

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


@pytest.mark.parametrize("own", [{}, {"logit_scale": 0.25, "final_logit_softcapping": 0.5}])
@pytest.mark.parametrize("places_at_once", [1, 3, 100])
def test_a_given_text_is_scored_in_parts_of_the_head_as_whole(tiny_model, own, places_at_once):
    """Log-probabilities, the likeliest token in each place and its own; of a head that scales and bounds, too."""
    model, sizes, vocab = tiny_model("qwen3"), [], 64
    ids = torch.arange(3, 13)[None]
    logits = model(ids).logits[0, :-1].detach()
    for key, value in own.items():
        setattr(model.config, key, value)
    if own:
        logits = (logits * 0.25 / 0.5).tanh() * 0.5
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, made: sizes.append(len(made)))

    with torch.no_grad():
        logprobs, places, likeliest = beside_likeliest(model, ids, max_logits=places_at_once * vocab + 1)

    assert sizes == {1: [1] * 9, 3: [3, 3, 3], 100: [9]}[places_at_once]
    wanted = logits.log_softmax(-1)
    np.testing.assert_allclose(logprobs, wanted.gather(-1, ids[0, 1:, None]).squeeze(-1), atol=1e-6, rtol=0)
    np.testing.assert_allclose(likeliest, wanted.max(-1).values, atol=1e-6, rtol=0)
    assert places.tolist() == wanted.argmax(-1).tolist()
