"""Heads and attention of families, as their configurations describe them, give the logits of the models themselves."""

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from mrl.config.policy_tables import LearnerTable
from mrl.errors import ModelFolderError
from mrl.learner.ranks.world import World
from mrl.learner.sharding import place
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


def test_a_model_with_states_is_refused_before_it_is_called():
    """Rows that lie in one pass would go on from each other's states."""
    kinds = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    model = Lfm2ForCausalLM(Lfm2Config(**SHAPE, **kinds)).eval()

    with pytest.raises(ModelFolderError, match=r"carry a state from token to token.*Lfm2ForCausalLM with Conv1d"):
        use_row_attention(model)


def test_convolutions_beside_the_layers_carry_no_state(make_family):
    """As those over sounds in a model that also hears (Phi 4 multimodal)."""
    model = make_family("granite")
    model.get_decoder().sounds = nn.Conv1d(1, 1, 3)

    use_row_attention(model)


def test_a_window_that_is_nowhere_but_in_a_mask_is_refused(make_family):
    """Granite hands none in; a model with chunks is refused before it is called."""
    model = make_family("granite")
    use_row_attention(model)
    model.config.sliding_window = 4
    with pytest.raises(ModelFolderError, match="cannot be replaced"):
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

    with pytest.raises(ModelFolderError, match="does not match the model's own forward"):
        check_forward(model, canary_sequences(64, num_tokens=12))


def scaled(tiny_model, *, std: float, precision: str) -> torch.nn.Module:
    """A model whose logits have this standard deviation, as a learner holds it."""
    model = tiny_model("llama", seed=3, tied=False)
    texts = torch.tensor(canary_sequences(64, num_tokens=12))
    with torch.no_grad():
        model.lm_head.weight *= std / model(texts).logits.std(-1).mean()
    return place(model, LearnerTable(precision=precision), World(0, 1, torch.device("cpu")))


def bend_head(model: torch.nn.Module) -> None:
    """A bias, which training leaves out."""
    bias = 0.5 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    model.register_forward_hook(lambda _module, _inputs, output: setattr(output, "logits", output.logits + bias))


def look_ahead(model: torch.nn.Module) -> None:
    """Attention of the model itself that is not causal."""
    for layer in model.model.layers:
        attend = layer.self_attn.forward

        def see_all(*args, attend=attend, attention_mask=None, **kwargs):
            packed = "packed_rows" in kwargs and kwargs["packed_rows"] is not None
            mask = attention_mask if packed or attention_mask is None else torch.zeros_like(attention_mask)
            return attend(*args, attention_mask=mask, **kwargs)

        layer.self_attn.forward = see_all


@pytest.mark.parametrize("std", [1.0, 4.0])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [None, bend_head, look_ahead])
def test_training_is_held_to_the_rounding_of_the_model(tiny_model, precision, std, fault):
    """Large logits in 16 bits are no fault, and hide none."""
    model = scaled(tiny_model, std=std, precision=precision)
    texts = canary_sequences(64, num_sequences=8, num_tokens=24)
    if fault is None:
        check_forward(model, texts, precision)
        return
    fault(model)
    with pytest.raises(ModelFolderError, match="does not match the model's own forward"):
        check_forward(model, texts, precision)


def test_texts_may_have_any_lengths(make_family):
    """As prompts of a pool have."""
    model = make_family("mistral")
    use_row_attention(model)

    check_forward(model, [[5, 9, 3, 7, 1, 2, 8, 30, 4, 4, 17], [7, 1, 2, 8], [60, 2, 9, 11, 33, 12]])
