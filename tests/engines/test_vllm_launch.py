"""How a vLLM server is started."""

import dataclasses
import json
from pathlib import Path

import pytest

from mrl.engines import vllm_launch
from mrl.engines.server_backend import AdapterShape, Launch
from mrl.errors import EngineError, ModelFolderError


def launch(folder: Path, *, device: str = "cpu", context_tokens: int = 512, **config: object) -> Launch:
    shape = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    told = config if "model_type" in config else {"model_type": "llama", **shape, **config}
    (folder / "config.json").write_text(json.dumps(told))
    python = Path("/engines/vllm/bin/python")
    return Launch(python, folder, "127.0.0.1", 8000, device, "float32", 3, 64, context_tokens, 7, ("--swap-space", "0"))


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_a_server_listens_on_loopback_and_reports_the_sampling_distribution(tmp_path):
    """A folder's generation_config is ignored, and further words come last."""
    words = vllm_launch.command(launch(tmp_path))

    assert words[0] == "/engines/vllm/bin/python"
    assert value_of(words, "serve") == str(tmp_path)
    assert value_of(words, "--host") == "127.0.0.1"
    assert value_of(words, "--logprobs-mode") == "processed_logprobs"
    assert value_of(words, "--generation-config") == "vllm"
    assert words[-2:] == ["--swap-space", "0"]


@pytest.mark.parametrize(("asked", "given"), [(128, "128"), (512, "256")])
def test_a_context_is_no_longer_than_the_model_reads(tmp_path, asked, given):
    """vLLM would refuse to start."""
    assert value_of(vllm_launch.command(launch(tmp_path, context_tokens=asked)), "--max-model-len") == given


@pytest.mark.parametrize(("longest", "at_once"), [(256, "4096"), (8192, "8192")])
def test_on_a_cpu_prompts_are_read_whole(tmp_path, longest, at_once):
    """A request with a seed whose prompt is read in parts would be the end of vLLM."""
    words = vllm_launch.command(launch(tmp_path, context_tokens=longest, max_position_embeddings=longest))

    assert "--no-enable-chunked-prefill" in words
    assert value_of(words, "--max-num-batched-tokens") == at_once
    assert "--no-enable-chunked-prefill" not in vllm_launch.command(launch(tmp_path, device="cuda"))


@pytest.mark.parametrize(("running", "at_once"), [(64, "1024"), (2048, "2048")])
def test_a_gpu_reads_fewer_tokens_at_once_where_texts_are_scored(tmp_path, running, at_once):
    """The logits of all of them take memory that vLLM does not plan; it wants at least as many as answers."""
    asked = dataclasses.replace(launch(tmp_path, device="cuda"), max_running=running)

    assert "--max-num-batched-tokens" not in vllm_launch.command(asked)
    words = vllm_launch.command(dataclasses.replace(asked, scores=True))
    assert value_of(words, "--max-num-batched-tokens") == at_once


@pytest.mark.parametrize("shape", [{"head_dim": 16}, {"head_dim": None, "num_attention_heads": 4}])
def test_a_head_size_that_vllm_lacks_on_a_cpu_is_refused_before_the_start(tmp_path, shape):
    """vLLM starts with it, and ends at the first request."""
    with pytest.raises(EngineError, match=r"config.json: vLLM on a CPU does not support this head_dim; got 16"):
        vllm_launch.command(launch(tmp_path, **shape))

    assert vllm_launch.command(launch(tmp_path, device="cuda", **shape))


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_positions": 128}
NESTED = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "max_position_embeddings": 128},
}


@pytest.mark.parametrize(
    ("config", "context"),
    [(GPT2, "128"), (NESTED, "128"), ({"model_type": "bloom", "hidden_size": 64, "n_head": 2}, "512")],
)
def test_a_model_may_name_its_shape_in_other_words_or_a_table_of_its_text_part(tmp_path, config, context):
    """And leave out what is usual for its family; a family without positions has no limit of its own."""
    assert value_of(vllm_launch.command(launch(tmp_path, **config)), "--max-model-len") == context


@pytest.mark.parametrize(("asked", "given"), [(96, "96"), (256, "128")])
def test_a_model_with_frequencies_for_long_rows_gets_short_ones(tmp_path, asked, given):
    """With a longer context vLLM turns short rows by the frequencies of long ones, 1 nat off from the learner."""
    rope = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    shape = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0}
    more = {"model_type": "phi3", "original_max_position_embeddings": 128, "rope_scaling": rope}
    folder = launch(tmp_path, context_tokens=asked, **shape, **more)

    assert value_of(vllm_launch.command(folder), "--max-model-len") == given


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_may_have_heads_of_their_own_sizes(tmp_path, device):
    """As Gemma 4's have."""
    layers = ["sliding_attention", "full_attention"]
    more = {"model_type": "gemma4_text", "layer_types": layers, "global_head_dim": 64, "num_hidden_layers": 2}

    assert vllm_launch.command(launch(tmp_path, device=device, head_dim=32, **more))


def test_of_a_model_that_sees_the_language_is_served_alone(tmp_path):
    """vLLM makes what prepares images with a tokenizer, and mrl gives it none."""
    seeing = NESTED | {"vision_config": {"hidden_size": 32}}

    assert "--language-model-only" in vllm_launch.command(launch(tmp_path, device="cuda", **seeing))
    with pytest.raises(EngineError, match="lacks torchvision, which image models need; got 'gemma3_text'"):
        vllm_launch.command(launch(tmp_path, **seeing))
    assert "--language-model-only" not in vllm_launch.command(launch(tmp_path, device="cuda", **NESTED))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_type", "no-such-family", r".*no-such-family"),
        ("num_attention_heads", "two", r".*'num_attention_heads' expected int, got str \(value: 'two'\)"),
    ],
)
def test_a_configuration_that_is_not_accepted_is_told_in_one_line(tmp_path, key, value, said):
    """The learner could not train such a model either."""
    with pytest.raises(ModelFolderError, match=rf"config.json cannot be used; got {said}"):
        vllm_launch.command(launch(tmp_path, **{key: value}))


def test_nothing_is_reported_or_fetched(tmp_path):
    """No usage statistics, no model hub; the workers find their extension and nothing else of this package."""
    variables = vllm_launch.environment(launch(tmp_path))

    assert variables["VLLM_NO_USAGE_STATS"] == variables["DO_NOT_TRACK"] == variables["HF_HUB_OFFLINE"] == "1"
    assert variables["OMP_NUM_THREADS"] == "3"
    inside = Path(variables["PYTHONPATH"])
    modules = {file.stem for file in inside.glob("*.py")}
    of_vllm = {"vllm_cpu_worker", "vllm_gpu_worker", "vllm_adapters"}
    of_vllm |= {"arriving_weights", "broadcast_member", "shared_memory"}
    assert modules == {"__init__", "sitecustomize"} | of_vllm


@pytest.mark.parametrize(("device", "may_sleep"), [("cuda", True), ("cuda", False), ("cpu", True), ("cpu", False)])
def test_it_can_free_the_memory_of_a_gpu_where_it_may_sleep(tmp_path, device, may_sleep):
    """On a CPU vLLM would not start with it."""
    words = vllm_launch.command(dataclasses.replace(launch(tmp_path, device=device), may_sleep=may_sleep))

    assert ("--enable-sleep-mode" in words) == (device == "cuda" and may_sleep)
    assert (words[words.index("--worker-extension-cls") + 1] == "vllm_gpu_worker.GpuWeightsExtension") == (
        device == "cuda"
    )


def test_room_for_adapters_is_made_at_the_start(tmp_path):
    """For one at a time, of the least rank that vLLM knows and that has room; and of these layers alone."""
    plain = launch(tmp_path)
    given = dataclasses.replace(plain, adapters=AdapterShape(12, ("o_proj", "q_proj")))

    words = vllm_launch.command(given)

    assert value_of(words, "--max-lora-rank") == "16"
    assert value_of(words, "--max-loras") == "1"
    assert words[words.index("--lora-target-modules") + 1 :][:2] == ["o_proj", "q_proj"]
    assert vllm_launch.environment(given)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert not any("lora" in word for word in vllm_launch.command(plain))
    assert not any("LORA" in name for name in vllm_launch.environment(plain))


def test_adapters_of_a_rank_that_vllm_does_not_take_are_refused(tmp_path):
    """Its largest is 512."""
    with pytest.raises(EngineError, match=r"learner\.lora\.rank.*got 513; wanted <= 512"):
        vllm_launch.command(dataclasses.replace(launch(tmp_path), adapters=AdapterShape(513, ("q_proj",))))


def test_a_server_of_several_gpus_shares_out_its_model(tmp_path, monkeypatch):
    """Its processes meet on loopback, unless the run has other hosts."""
    monkeypatch.delenv("MRL_HOST", raising=False)
    one = launch(tmp_path, device="cuda")
    two = dataclasses.replace(one, gpus=2)

    assert "--tensor-parallel-size" not in vllm_launch.command(one)
    assert value_of(vllm_launch.command(two), "--tensor-parallel-size") == "2"
    assert "NCCL_SOCKET_IFNAME" not in vllm_launch.environment(one)
    assert vllm_launch.environment(two)["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("MRL_HOST", "n1")
    assert "NCCL_SOCKET_IFNAME" not in vllm_launch.environment(two)
    with pytest.raises(EngineError, match="cannot split this model evenly"):
        vllm_launch.command(dataclasses.replace(one, gpus=4))
