"""Texts are scored in any number of passes, whatever their lengths."""

import numpy as np
import pytest
import torch

from mrl.memory_plan.pass_memory import LiveBytes
from mrl.models.scoring import beside_likeliest, score_answers, score_tokens

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


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2"])
@pytest.mark.parametrize("places_at_once", [1, 4, 9])
def test_a_long_answer_is_scored_in_parts_as_whole(tiny_model, family, places_at_once):
    """By a model that sees all tokens before, or those of a window; no forward makes more logits than it may."""
    model, sizes, vocab = tiny_model(family), [], 64
    prompt, answers = np.array([5, 9, 3], np.int32), [np.arange(4, 4 + size, dtype=np.int32) for size in (9, 2)]
    model.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.logits.shape[1]))

    found = score_answers(model, prompt, answers, temperature=0.7, max_logits=places_at_once * vocab)

    assert sizes == {1: [1] * 18, 4: [4, 4, 1] * 2, 9: [9, 9]}[places_at_once]
    for answer, (scored, *_) in zip(answers, found, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
        wanted = (model(ids).logits[0, 2:-1] / 0.7).log_softmax(-1).gather(-1, ids[0, 3:, None]).squeeze(-1)
        np.testing.assert_allclose(scored, wanted.detach().numpy(), atol=1e-5, rtol=0)


def test_answers_behind_a_long_prompt_are_read_a_few_at_once(tiny_model):
    """However few logits they need: a forward over all of them with their prompt would take the memory of a GPU."""
    model, rows = tiny_model("qwen3"), []
    prompt, answers = np.full(3000, 5, np.int32), [np.array([7], np.int32)] * 5
    model.register_forward_hook(lambda _module, _inputs, output: rows.append(len(output.logits)))

    score_answers(model, prompt, answers, temperature=1.0)

    assert rows == [2, 2, 1]


def test_scoring_a_long_answer_takes_the_memory_of_a_part_of_its_logits(tiny_model):
    """Of 32 tokens at once, where the answer has 600: of a released model all would be tens of gigabytes."""
    model, vocab = tiny_model("qwen3"), 64
    prompt, answers = np.array([5], np.int32), [np.full(600, 7, np.int32)]
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        score_answers(model, prompt, answers, temperature=1.0, max_logits=1 << 26)
        whole = live.take_peak()
        score_answers(model, prompt, answers, temperature=1.0, max_logits=32 * vocab)
        in_parts = live.take_peak()

    assert whole > 3 * 600 * vocab * 4
    assert in_parts < whole / 2
