"""The kernel for rows of all lengths is proved before it is chosen; the device is asked through a stand-in here."""

import pytest
import torch
from torch.nn.attention import varlen
from transformers import AutoConfig, LlamaConfig

from mrl.errors import ConfigError
from mrl.models import varlen_attention
from mrl.models.varlen_proof import LENGTHS, Heads, heads_of, prove_varlen

HEADS = Heads(num_query=8, num_cached=2, size=64, value_size=64, softcap=None)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the processor were a GPU from Ampere on."""
    monkeypatch.setattr(varlen_attention, "capability_of", lambda device: (9, 0))


def by_row(query, key, value, bounds, *, longest, scaling, sliding_window):
    """What the kernel has to compute, in float32."""
    assert longest == max(LENGTHS)
    parts = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        heads = (states[begin:end].float().transpose(0, 1) for states in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


def test_a_kernel_that_computes_the_same_is_proved():
    prove_varlen(CPU, HEADS, by_row)


@pytest.mark.parametrize("fault", ["not causal", "one row", "wrong head"])
def test_a_kernel_that_computes_something_else_is_refused(fault: str):
    def wrong(query, key, value, bounds, **others):
        if fault == "one row":
            bounds = torch.tensor([0, sum(LENGTHS)])
            others["longest"] = max(LENGTHS)
        if fault == "wrong head":
            key = key.flip(1)
        if fault == "not causal":
            return by_row(query.flip(0), key.flip(0), value.flip(0), bounds.max() - bounds.flip(0), **others).flip(0)
        return by_row(query, key, value, bounds, **others)

    with pytest.raises(ConfigError, match="results on this machine differ"):
        prove_varlen(CPU, HEADS, wrong)


def test_a_kernel_that_is_not_there_is_refused_with_its_word():
    """As on the processor, which torch's own lacks."""
    with pytest.raises(ConfigError, match="the kernel fails on this machine"):
        prove_varlen(CPU, HEADS)


def test_keys_and_values_of_two_widths_have_a_line_of_their_own():
    """DeepSeek V3: 192 and 128."""
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=1)
    heads = heads_of(config)
    assert (heads.size, heads.value_size) == (192, 128)
    with pytest.raises(ConfigError, match=r"keys and values of the same width.*192 and 128"):
        prove_varlen(CPU, heads, by_row)


def test_heads_are_those_of_the_configuration():
    config = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    assert heads_of(config) == HEADS
    assert hasattr(varlen, "varlen_attn")
