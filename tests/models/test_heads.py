"""Heads and attention of families, as their configurations describe them, give the logits of the models themselves."""

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from mrl.errors import ModelFolderError
from mrl.learner.trainer import check_forward
from mrl.models.heads import HeadShape, head_shape
from mrl.models.row_attention import use_row_attention
from mrl.weights.canary import canary_sequences

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MODELS = {
    "gemma2": (
        lambda: Gemma2ForCausalLM(
            Gemma2Config(**SHAPE, final_logit_softcapping=3.0, attn_logit_softcapping=0.5, sliding_window=4)
        ),
        HeadShape(softcap=3.0),
    ),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)), HeadShape()),
    "granite": (lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=8.0)), HeadShape(divisor=8.0)),
    "cohere": (lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)), HeadShape(divisor=4.0)),
}


@pytest.fixture
def make_family():
    """A random model of a family with its weights about as large as trained ones."""

    def make(family: str):
        torch.manual_seed(0)
        return MODELS[family][0]().eval()

    return make


@pytest.mark.parametrize("family", MODELS)
def test_training_scores_what_a_family_with_its_own_head_scores(make_family, family):
    """Soft-capped and scaled logits, in packed rows; sliding windows reach no other row."""
    model = make_family(family)

    assert head_shape(model) == MODELS[family][1]
    use_row_attention(model)
    check_forward(model, canary_sequences(64, num_tokens=12))


def test_a_window_that_is_nowhere_but_in_a_mask_is_refused(make_family):
    """Granite hands none in; a model with chunks is refused before it is called."""
    model = make_family("granite")
    use_row_attention(model)
    model.config.sliding_window = 4
    with pytest.raises(ModelFolderError, match="cannot be exchanged"):
        check_forward(model, canary_sequences(64, num_tokens=12))
    model.config.attention_chunk_size = 8
    with pytest.raises(ModelFolderError, match="attention_chunk_size"):
        use_row_attention(model)


@pytest.mark.parametrize("family", MODELS)
def test_a_head_that_is_not_as_described_is_found_out(make_family, family):
    """What the configuration says is compared with what the model does before the first step."""
    model = make_family(family)
    use_row_attention(model)
    model.register_forward_hook(lambda _module, _inputs, output: setattr(output, "logits", 1.5 * output.logits))

    with pytest.raises(ModelFolderError, match="does not compute what"):
        check_forward(model, canary_sequences(64, num_tokens=12))
