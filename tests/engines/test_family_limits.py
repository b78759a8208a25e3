"""Models that a server computes otherwise than transformers are refused before it starts."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from mrl.engines import sglang_launch, vllm_launch
from mrl.engines.family_limits import check_learning, check_parts
from mrl.engines.server_backend import Launch
from mrl.engines.tensor_folder import tensor_names
from mrl.errors import EngineError
from mrl.models.skeleton import config_of_folder, published_names
from tests.support.family_rig import FAMILIES, MIXTURES, make_family

SERVERS = {"vllm": vllm_launch, "sglang": sglang_launch}


def launch(folder: Path, context_tokens: int, **config: object) -> Launch:
    shape = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(shape | config))
    return Launch(Path("python"), folder, "127.0.0.1", 8000, "cpu", "float32", 1, 16, context_tokens, 0)


@pytest.mark.parametrize(
    ("server", "family"), [("sglang", "mistral"), ("sglang", "phi3"), ("sglang", "cohere2"), ("vllm", "cohere2")]
)
def test_a_context_longer_than_a_window_that_is_not_kept_is_refused(tmp_path, server, family):
    """Up to the window nothing is hidden, so it does not matter."""
    config = {"model_type": family, "sliding_window": 128, "num_hidden_layers": 2, "pad_token_id": 0}
    with pytest.raises(EngineError, match=rf"{server} does not apply the sliding window of {family}.*<= 128"):
        SERVERS[server].command(launch(tmp_path, 129, **config))

    assert SERVERS[server].command(launch(tmp_path, 128, **config))
    assert vllm_launch.command(launch(tmp_path, 129, **config | {"model_type": "mistral"}))


def test_families_and_a_soft_cap_that_sglang_computes_otherwise_are_refused(tmp_path):
    """The cap on a CPU alone; vLLM has both."""
    for family in ("gemma", "olmo3"):
        with pytest.raises(EngineError, match=f"sglang computes {family} differently"):
            sglang_launch.command(launch(tmp_path, 128, model_type=family))
    with pytest.raises(EngineError, match="does not apply the attention soft cap of gemma2"):
        sglang_launch.command(launch(tmp_path, 128, model_type="gemma2"))

    assert sglang_launch.command(dataclasses.replace(launch(tmp_path, 128, model_type="gemma2"), device="cuda"))
    assert vllm_launch.command(launch(tmp_path, 128, model_type="gemma2"))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_whose_head_is_tied_is_refused_by_sglang(tmp_path, family):
    """It would compute with a head that nothing fills; vLLM ties it."""
    config = {"model_type": family, "tie_word_embeddings": True}
    with pytest.raises(EngineError, match=rf"sglang does not tie the output head of {family}"):
        sglang_launch.command(launch(tmp_path, 128, **config))

    assert vllm_launch.command(launch(tmp_path, 128, **config))
    assert sglang_launch.command(launch(tmp_path, 128, **config | {"tie_word_embeddings": False}))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_published_has_the_names_of_the_folder(tmp_path, family):
    """Also of experts, which transformers holds together and saves one by one."""
    folder = make_family(tmp_path, family)
    tied = {"lm_head.weight"} if config_of_folder(folder).tie_word_embeddings else set()

    assert set(published_names(config_of_folder(folder))) | tied == tensor_names(folder) | tied


@pytest.mark.parametrize("family", ["qwen3", "phi3", *MIXTURES[:2]])
def test_experts_that_a_folder_has_by_other_names_are_refused(tmp_path, family):
    """One may hold them together, as transformers does in memory; a server then knows no others."""
    folder = make_family(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = config_of_folder(folder)
    check_learning("vllm", folder, config, device="cpu", adapters=False)
    model.save_pretrained(folder, save_original_format=False)

    check_learning("vllm", folder, config, device="cuda", adapters=True)
    for server in SERVERS:
        if family in MIXTURES:
            with pytest.raises(EngineError, match=rf"{server} cannot load .*experts\.0.*another rollout\.engine"):
                check_learning(server, folder, config, device="cpu", adapters=False)
        else:
            check_learning(server, folder, config, device="cpu", adapters=False)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_adapters_beside_experts_are_refused_on_a_cpu(tmp_path, family):
    """vLLM takes kernels of GPUs for experts of a model with adapters, and ends with the first request."""
    folder = make_family(tmp_path, family)
    check_learning("vllm", folder, config_of_folder(folder), device="cuda", adapters=True)
    if family not in MIXTURES:
        check_learning("vllm", folder, config_of_folder(folder), device="cpu", adapters=True)
        return
    with pytest.raises(EngineError, match=r"vllm on a CPU cannot serve adapters .*experts.*mixtral.*files"):
        check_learning("vllm", folder, config_of_folder(folder), device="cpu", adapters=True)


@pytest.mark.parametrize("server", SERVERS)
def test_a_policy_with_latent_attention_learns_on_no_server(tmp_path, server):
    """It would go on with what it made of the old weights, which no proof of bytes looks at."""
    folder = make_family(tmp_path, "deepseek_v3")
    for adapters in (False, True):
        with pytest.raises(EngineError, match=rf"{server} cannot .*latent attention.*deepseek_v3, kv_lora_rank 32"):
            check_learning(server, folder, config_of_folder(folder), device="cpu", adapters=adapters)


@pytest.mark.parametrize(
    ("heads", "cached", "inner", "gpus", "wanted"),
    [
        (14, 2, 4864, 4, "one of 1, 2"),  # Qwen2.5-0.5B
        (32, 8, 14336, 3, "one of 1, 2, 4, 8, 16, 32"),
        (12, 8, 1200, 6, "one of 1, 2, 4"),  # key-value heads neither shared out nor alike
        (32, 32, 1000, 16, "one of 1, 2, 4, 8"),
    ],
)
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_model_that_does_not_come_apart_is_refused(server, heads, cached, inner, gpus, wanted):
    """With the counts that it does come apart into."""
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=cached, intermediate_size=inner)

    with pytest.raises(EngineError, match=f"config.json: {server} cannot split .*{gpus} GPUs for.*wanted {wanted};"):
        check_parts(server, "config.json", config, gpus)
    for count in wanted.removeprefix("one of ").split(", "):
        check_parts(server, "config.json", config, int(count))
