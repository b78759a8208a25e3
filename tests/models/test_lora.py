"""Adapters: a model with them is the model at the start, trains as W + alpha / rank * B A does, and merges into it."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3Config

from mrl.config.policy_tables import LoraTable, MakeTable
from mrl.errors import ConfigError
from mrl.models.architectures import init_model
from mrl.models.load_policy import load_policy
from mrl.models.lora import adapted_modules, adapters_off, add_adapters, is_adapter, write_adapters
from mrl.models.parameters import named_weights, trained_weights, whole_weights

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
TABLE = LoraTable(rank=3, alpha=7)


def make_model(family: str = "qwen3") -> nn.Module:
    recipe = MakeTable(architecture=family, tokenizer="byte_level", hidden_size=32, num_layers=2, num_heads=4)
    return init_model(recipe, vocab_size=61, eos_id=0, pad_id=0).eval()


def adapted(table: LoraTable = TABLE, *, moved: bool = True, family: str = "qwen3") -> nn.Module:
    """A model with adapters; with `moved`, of which B is no longer zero."""
    model = make_model(family)
    add_adapters(model, table, seed=5)
    if moved:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, tensor in trained_weights(model).items():
                if ".lora_B." in name:
                    tensor.normal_(0.0, 0.2, generator=generator)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_a_model_with_new_adapters_is_the_model(family: str) -> None:
    """Bit for bit, by its outputs and by the weights that engines get; only adapters are trained."""
    plain, model = make_model(family), adapted(moved=False, family=family)
    assert torch.equal(logits(model), logits(plain))
    whole = dict(whole_weights(model))
    assert list(whole) == list(named_weights(plain))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in named_weights(plain).items())
    assert {name for name, one in model.named_parameters() if one.requires_grad} == set(trained_weights(model))
    assert all(is_adapter(name) for name in trained_weights(model))
    assert len(adapted_modules(model)) == 2 * 7, "all linear layers of both blocks, and not the head"


def test_what_sees_gets_no_adapters() -> None:
    """Its layers have names that those of the language model have too."""
    text = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    sight = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text | {"num_hidden_layers": 2, "head_dim": 8, "vocab_size": 50},
        vision_config=sight | {"num_hidden_layers": 1},
        mm_tokens_per_image=4,
    )
    model = AutoModelForCausalLM.from_config(config)
    add_adapters(model, TABLE, seed=1)
    names = adapted_modules(model)
    assert len(names) == 2 * 7
    assert all(name.startswith("model.language_model.") for name in names)
    with pytest.raises(ConfigError, match="no linear layers of these names; got 'fc1'; wanted some of down_proj"):
        add_adapters(AutoModelForCausalLM.from_config(config), LoraTable(target_modules=["fc1"]), seed=1)


def test_equal_seeds_give_equal_adapters_and_leave_the_generator() -> None:
    """Ranks need the same ones."""
    one = adapted(moved=False)
    torch.rand(7)
    before = torch.random.get_rng_state()
    other = adapted(moved=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, tensor in trained_weights(one).items():
        assert torch.equal(tensor, trained_weights(other)[name])
    assert any(tensor.abs().max() > 0 for tensor in trained_weights(one).values())


def test_merged_weights_compute_what_the_adapters_do() -> None:
    """To 1e-5; and without its adapters the model is the plain one, bit for bit."""
    plain, model = make_model(), adapted()
    engine = make_model()
    engine.load_state_dict(dict(whole_weights(model)), strict=False)
    assert (logits(model) - logits(plain)).abs().max() > 0.01
    torch.testing.assert_close(logits(engine), logits(model), rtol=0, atol=1e-5)
    with adapters_off(model):
        assert torch.equal(logits(model), logits(plain))
    assert not torch.equal(logits(model), logits(plain))


def test_gradients_are_those_of_w_plus_b_a() -> None:
    """A twin in which every adapted weight is spelled out as W + alpha / rank * B A."""
    model, twin = adapted(), make_model()
    logits(model).square().sum().backward()
    factors = {name: tensor.detach().clone().requires_grad_() for name, tensor in trained_weights(model).items()}
    spelled = {
        f"{name}.weight": twin.get_submodule(name).weight.detach()
        + 7 / 3 * factors[f"{name}.lora_B.default.weight"] @ factors[f"{name}.lora_A.default.weight"]
        for name in adapted_modules(model)
    }
    torch.func.functional_call(twin, spelled, (IDS,), {"use_cache": False}).logits.square().sum().backward()
    for name, tensor in trained_weights(model).items():
        torch.testing.assert_close(tensor.grad, factors[name].grad, rtol=1e-4, atol=1e-5)
    assert all(one.grad is None for name, one in model.named_parameters() if not is_adapter(name))


def test_only_the_named_modules_get_adapters() -> None:
    """By their last names."""
    model = adapted(LoraTable(rank=2, target_modules=["q_proj", "v_proj"]))
    assert {name.rpartition(".")[2] for name in adapted_modules(model)} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("modules", [["attention"], ["q_proj", "w_proj"], ["lm_head"]])
def test_modules_that_do_not_exist_are_told_on_one_line(modules: list[str]) -> None:
    """With those that do; also when only one of several is wrong."""
    with pytest.raises(
        ConfigError, match=r"target_modules: the model has no linear layers of these names.*o_proj.*q_proj"
    ) as told:
        add_adapters(make_model(), LoraTable(target_modules=modules), seed=0)
    assert "\n" not in str(told.value)
    assert modules[-1] in str(told.value)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_written_adapters_are_what_peft_loads(tmp_path: Path) -> None:
    """Beside the plain model they give the trained one."""
    from peft import PeftModel

    plain, model = make_model(), adapted(LoraTable(rank=3, alpha=7, target_modules=["q_proj", "down_proj"]))
    plain.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    write_adapters(tmp_path / "adapter", LoraTable(rank=3, alpha=7), trained_weights(model), str(tmp_path / "plain"))
    loaded = PeftModel.from_pretrained(load_policy(tmp_path / "plain"), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "named", "revision"),
    [
        ("Qwen/Qwen3-0.6B@" + 8 * "01234", "Qwen/Qwen3-0.6B", 8 * "01234"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("/models/qwen@home", "/models/qwen@home", None),
        ("models/qwen@home", "models/qwen@home", None),
    ],
)
def test_peft_finds_the_model_that_adapters_belong_to(tmp_path: Path, monkeypatch, model, named, revision) -> None:
    """peft asks the hub for an id and a revision: it refuses both as one. A folder that is there is no id."""
    from peft import PeftConfig

    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/qwen@home").mkdir(parents=True)
    table = LoraTable(rank=3, target_modules=["q_proj"])
    write_adapters(tmp_path / "adapter", table, trained_weights(adapted(table)), model)
    described = PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (described.base_model_name_or_path, described.revision) == (named, revision)
