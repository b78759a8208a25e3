"""What a pass needs in memory, told from tensors without data, against the same pass over real ones."""

import math
from dataclasses import astuple

import numpy as np
import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Llama4TextConfig, LlamaConfig, PreTrainedConfig

from mrl.config.policy_tables import LoraTable, MakeTable
from mrl.learner.forward import ForwardSettings, answer_logprobs
from mrl.learner.packing import pack
from mrl.learner.sharding import checkpoint_blocks, transformer_blocks
from mrl.memory_plan.pass_memory import LiveBytes, answer_peak, given_text_peak, pass_peaks, scoring_peak
from mrl.models.architectures import init_model
from mrl.models.lora import add_adapters
from mrl.models.row_attention import use_row_attention
from mrl.models.scoring import MAX_LOGITS, rows_at_once, score_answers, score_beside_likeliest, score_tokens
from mrl.models.size import Microbatch
from mrl.models.skeleton import config_of_number, config_of_recipe, model_size, once_per_model
from mrl.models.varlen_proof import Heads, heads_of
from mrl.objectives.specs import Clipped
from mrl.sharing.regime import Component, TrainingExample
from mrl.weights.canary import make_canary

COMPONENTS = (Component("own", Clipped(), 1.0, "rows", "own"),)
NUM_BLOCKS = 6
BATCH = Microbatch(rows=7, rows_per_prompt=3, prompt_tokens=8, answer_tokens=24)
TOLD = {"precision": "float32", "batch": BATCH}


def recipe(family: str) -> MakeTable:
    return MakeTable(architecture=family, tokenizer="byte_level", hidden_size=32, num_layers=NUM_BLOCKS, num_heads=4)


def rows_like(batch: Microbatch) -> list[TrainingExample]:
    zeros = np.zeros(batch.answer_tokens, np.float32)
    prompt, answer = np.zeros(batch.prompt_tokens, np.int32), np.zeros(batch.answer_tokens, np.int32)
    return [
        TrainingExample(prompt + row // batch.rows_per_prompt, answer, "own", zeros, zeros, None, "p", "me")
        for row in range(batch.rows)
    ]


def real_peak(family: str, *, checkpointing: bool, dtype: torch.dtype) -> int:
    """The most bytes at once in one pass over the whole model, gradients counted until they are added up."""
    made = recipe(family)
    model = init_model(made, vocab_size=made.vocab_size, eos_id=0, pad_id=0).to(dtype).eval()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    if checkpointing:
        checkpoint_blocks(transformer_blocks(model))
    use_row_attention(model)
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        (batch,) = pack(rows_like(BATCH), COMPONENTS, microbatch_tokens=10_000)
        assert len(batch.input_ids_L) == BATCH.places
        answer_logprobs(model, batch, ForwardSettings(1.0)).sum().backward()
        return live.take_peak()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "qwen3_moe"])
def test_a_model_of_a_single_block_is_counted_too(family):
    """It has fewer blocks, and fewer kinds of them, than the models that are looked at."""
    made = recipe(family).model_copy(update={"num_layers": 1})
    model = init_model(made, vocab_size=made.vocab_size, eos_id=0, pad_id=0)

    assert model_size(config_of_recipe(made)).parameters == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize(
    ("family", "checkpointing", "precision"),
    [
        ("qwen3", False, "float32"),
        ("llama", False, "bfloat16"),
        ("gemma3", False, "float32"),
        ("qwen3", True, "float32"),
        ("qwen3_moe", False, "float32"),
        ("qwen3_moe", True, "bfloat16"),
    ],
)
def test_a_pass_over_no_data_tells_what_a_real_one_needs(family: str, checkpointing: bool, precision: str) -> None:
    """Two and three blocks tell of six: to one in a hundred."""
    peaks = pass_peaks(
        config_of_recipe(recipe(family)),
        precision=precision,
        batch=BATCH,
        checkpointing=checkpointing,
    )
    told = max(peaks.forward, peaks.head, peaks.blocks, peaks.bottom)
    real = real_peak(family, checkpointing=checkpointing, dtype=getattr(torch, precision))
    assert told == pytest.approx(real, rel=0.01)


def test_checkpointing_and_entropy_change_what_a_pass_needs() -> None:
    """Less is kept with the one, more is computed with the other."""
    config = config_of_recipe(recipe("llama"))
    plain = pass_peaks(config, **TOLD)
    assert pass_peaks(config, **TOLD, checkpointing=True).forward < 0.5 * plain.forward
    assert pass_peaks(config, **TOLD, with_entropy=True).forward > plain.forward


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_offloaded_inputs_are_on_the_host_and_not_on_the_device(family: str) -> None:
    """One for each block: as many bytes there, in powers of two, as are missing here at the end of the forward."""
    deep = recipe(family).model_copy(update={"num_layers": 40})
    config = config_of_recipe(deep)
    stays, leaves = (pass_peaks(config, **TOLD, checkpointing=True, offload=offload) for offload in (False, True))
    inputs = 40 * 4 * BATCH.places * 32
    assert stays.offloaded == 0
    assert leaves.offloaded == 40 * 2 ** math.ceil(math.log2(inputs / 40))
    assert stays.head - leaves.head == inputs
    assert stays.blocks - leaves.blocks == pytest.approx(inputs, rel=0.06)


def test_live_bytes_count_a_storage_once_and_until_it_is_let_go() -> None:
    """Views share a storage; what is freed no longer counts."""
    with LiveBytes() as live:
        kept = torch.zeros(1000)
        view = kept[:500].view(5, 100)
        for _ in range(3):
            torch.zeros(2000)
        assert live.take_peak() == 4000 + 8000
        del kept
        assert live.take_peak() == 4000, "the view holds it"
        del view
        live.take_peak()
        assert live.take_peak() == 0


def test_what_was_there_before_is_not_counted() -> None:
    """A weight is no activation, and neither is its transpose; the product is."""
    weight, hidden = torch.ones(300, 100), torch.ones(7, 100)
    with LiveBytes([weight, hidden]) as live:
        transposed = weight.t()
        assert live.take_peak() == 0
        product = hidden @ transposed
        assert live.take_peak() == product.nbytes == 7 * 300 * 4


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "qwen3_moe"])
def test_the_size_of_a_model_is_counted_without_making_it(family: str) -> None:
    """All parameters, those of a block, and what a token leaves in the cache."""
    made = recipe(family)
    model = init_model(made, vocab_size=made.vocab_size, eos_id=0, pad_id=0)
    size = model_size(model.config)
    assert size.parameters == size.trained == model.num_parameters()
    assert size.has_experts == (family == "qwen3_moe")
    assert size.block == sum(parameter.numel() for parameter in transformer_blocks(model)[0].parameters())
    assert size.outer == size.parameters - NUM_BLOCKS * size.block
    assert (size.cached_per_token, size.query_heads_per_cached) == (NUM_BLOCKS * 2 * 2 * 8, 2)


def test_a_model_whose_layers_differ_is_counted_too() -> None:
    """Gemma 4 has wider heads in some layers, and in others no keys and values; the plan takes the most."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 99, "vocab_size_per_layer_input": 99}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32}
    layers = {"layer_types": 3 * ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2, "bos_token_id": 0}
    config = Gemma4TextConfig(num_hidden_layers=6, hidden_size_per_layer_input=8, **shape, **heads, **layers)
    size = model_size(config)
    assert (size.num_blocks, size.cached_per_token, size.query_heads_per_cached) == (6, 6 * 2 * 32, 2)
    with torch.device("meta"):
        exact = Gemma4ForCausalLM(config).num_parameters()
    assert exact <= size.parameters + 6 * 2 * 64 * 32
    assert size.parameters == pytest.approx(exact, rel=0.2)
    assert heads_of(config) == Heads(2, 1, 32, 32, None)


def test_the_end_of_the_backward_pass_needs_one_block_alone() -> None:
    """Whatever the number of blocks; what comes before needs as much more as there are blocks more."""
    deep = recipe("llama").model_copy(update={"num_layers": 2 * NUM_BLOCKS})
    peaks, twice = (pass_peaks(config_of_recipe(one), **TOLD) for one in (recipe("llama"), deep))
    assert twice.bottom == peaks.bottom
    assert twice.blocks - peaks.blocks == twice.forward - peaks.forward > NUM_BLOCKS * BATCH.places * 32 * 4


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    """One hidden state per block is what more of them need."""
    deep = recipe("llama").model_copy(update={"num_layers": NUM_BLOCKS + 1})
    peaks, more = (pass_peaks(config_of_recipe(one), **TOLD, checkpointing=True) for one in (recipe("llama"), deep))
    assert more.forward - peaks.forward == BATCH.places * 32 * 4


def test_adapters_are_counted_and_let_a_pass_keep_less() -> None:
    """What frozen weights would need for their gradients is not kept."""
    made, lora = recipe("llama"), LoraTable(rank=4)
    model = init_model(made, vocab_size=made.vocab_size, eos_id=0, pad_id=0)
    plain = model.num_parameters()
    add_adapters(model, lora, seed=0)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    size = model_size(config_of_recipe(made), lora)
    assert (size.parameters, size.trained) == (plain + trained, trained)
    assert size.trained_block * NUM_BLOCKS == trained
    config = config_of_recipe(made)
    assert pass_peaks(config, **TOLD, lora=lora).bottom < pass_peaks(config, **TOLD).bottom


def test_a_number_alone_stands_for_a_middling_model() -> None:
    """Its parameters come near to the number."""
    assert model_size(config_of_number(2_000_000_000)).parameters == pytest.approx(2e9, rel=0.15)


def test_larger_chunks_of_logits_are_counted() -> None:
    """Those of float32 are there at once, and become log-probabilities and their gradient where they are."""
    config = LlamaConfig(vocab_size=50_000, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    batch = Microbatch(16, 4, 32, 128)
    few, many = (
        pass_peaks(config, precision="float32", batch=batch, chunk_logits=chunk) for chunk in (1 << 22, 1 << 26)
    )
    assert max(astuple(many)) - max(astuple(few)) > 0.9 * 4 * ((1 << 26) - (1 << 22))


@pytest.mark.parametrize(
    ("dtype", "number_format"), [("float32", None), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_a_canary_over_no_data_tells_what_a_real_one_needs(dtype, number_format) -> None:
    """Weights that are rounded for it included, and no more rows at once than there are, or than go at once."""
    made = recipe("qwen3").model_copy(update={"vocab_size": 30_000})
    model = init_model(made, vocab_size=30_000, eos_id=0, pad_id=0).to(getattr(torch, dtype)).eval()
    ids = torch.zeros(5, 20, dtype=torch.int64).tolist()
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        if number_format:
            make_canary(model, ids, number_format)
        else:
            score_tokens(model, ids)
    found = scoring_peak(config_of_recipe(made), dtype=dtype, rows=5, tokens=20, number_format=number_format)
    assert found == pytest.approx(live.take_peak(), rel=0.02)
    assert found > 5 * 19 * 30_000 * 4 + 30_000 * 32 * 4 * bool(number_format)
    rounds = {"dtype": dtype, "tokens": 20, "number_format": number_format}
    most = rows_at_once(20, 30_000)
    assert scoring_peak(config_of_recipe(made), rows=20 * most, **rounds) == scoring_peak(
        config_of_recipe(made), rows=2 * most, **rounds
    )


def test_a_given_text_over_no_data_tells_what_a_real_one_needs() -> None:
    """And a long one through a large head no more than a part of its logits at once."""
    made = recipe("qwen3").model_copy(update={"vocab_size": 30_000})
    model = init_model(made, vocab_size=30_000, eos_id=0, pad_id=0).eval()
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        score_beside_likeliest(model, [0] * 20)
    found = given_text_peak(config_of_recipe(made), dtype="float32", tokens=20)
    assert found == pytest.approx(live.take_peak(), rel=0.02)
    assert found > 19 * 30_000 * 4
    longer = given_text_peak(config_of_recipe(made), dtype="float32", tokens=2 * MAX_LOGITS // 30_000)
    assert 4 * MAX_LOGITS < longer < 3 * 4 * MAX_LOGITS


def test_an_answer_of_a_peer_over_no_data_tells_what_a_real_one_needs() -> None:
    """Its logits, divided by the temperature; of teachers whose head no learner could read (Llama 4) too."""
    made = recipe("qwen3").model_copy(update={"vocab_size": 30_000})
    model = init_model(made, vocab_size=30_000, eos_id=0, pad_id=0).eval()
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        score_answers(model, np.zeros(5, np.int32), [np.zeros(20, np.int32)], temperature=0.7)
    found = answer_peak(config_of_recipe(made), dtype="float32", prompt_tokens=5, answer_tokens=20)
    assert found == pytest.approx(live.take_peak(), rel=0.02)
    shape = {"hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64, "head_dim": 16}
    experts = {"num_local_experts": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 99}
    llama4 = Llama4TextConfig(num_hidden_layers=4, pad_token_id=0, **shape, **experts)
    assert answer_peak(llama4, dtype="float32", prompt_tokens=5, answer_tokens=20) > 20 * 99 * 4


def test_what_a_model_needs_is_found_once() -> None:
    """Of equal configurations and arguments; whatever else is asked is found too."""
    asked = []

    @once_per_model
    def find(config: PreTrainedConfig, *, rows: int, lora: LoraTable | None = None) -> int:
        asked.append((config.hidden_size, rows, lora and lora.rank))
        return len(asked)

    small, same = (config_of_recipe(recipe("llama")) for _ in range(2))
    large = config_of_recipe(recipe("llama").model_copy(update={"hidden_size": 64}))
    assert [find(small, rows=1), find(same, rows=1), find(same, rows=2), find(large, rows=1)] == [1, 1, 2, 3]
    assert [find(small, rows=1, lora=LoraTable(rank=rank)) for rank in (2, 2, 4)] == [4, 4, 5]
    assert len(asked) == 5
