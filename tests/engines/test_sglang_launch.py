"""How an SGLang server is started."""

import dataclasses
import json
from pathlib import Path

import pytest

from mrl.engines import sglang_launch
from mrl.engines.server_backend import Launch
from mrl.errors import EngineError


@pytest.fixture
def launch(tmp_path) -> Launch:
    """A small model on a CPU."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 256}))
    return Launch(Path("/env/bin/python"), tmp_path, "127.0.0.1", 4321, "cpu", "float32", 2, 8, 512, 7)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_it_speaks_on_the_loopback_address_alone(launch):
    """At the port that was chosen for it."""
    words = sglang_launch.command(launch)

    assert option(words, "--host") == "127.0.0.1"
    assert option(words, "--port") == "4321"


def test_its_context_is_that_of_the_model_at_most(launch):
    """It does not start with a longer one; the cache has room for all that may run."""
    words = sglang_launch.command(launch)

    assert option(words, "--context-length") == "256"
    assert option(words, "--max-total-tokens") == str(8 * 256)
    shorter = sglang_launch.command(dataclasses.replace(launch, max_context_tokens=100))
    assert option(shorter, "--context-length") == "107", "it gives seven to nobody"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_positions": 128},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "max_position_embeddings": 128}},
    ],
)
def test_a_model_may_name_its_context_in_other_words_or_a_table_of_its_text_part(launch, config):
    """It is read as its family reads it."""
    (launch.model_folder / "config.json").write_text(json.dumps(config))

    assert option(sglang_launch.command(launch), "--context-length") == "128"


def test_programs_of_its_environment_come_first_on_a_gpu(launch, monkeypatch):
    """There it compiles kernels by `ninja`, which nothing but its own environment need have."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    variables = sglang_launch.environment(dataclasses.replace(launch, device="cuda"))

    assert variables["PATH"] == "/env/bin:/usr/bin:/bin"
    assert "CUDA_HOME" not in variables, "an environment of the user's own has no toolkit of ours"


def test_it_compiles_by_the_nvcc_of_its_environment(launch, tmp_path, monkeypatch):
    """The machine's own may be of another CUDA than its torch, or not there."""
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda-12.4")
    toolkit = tmp_path / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13"
    (toolkit / "lib64").mkdir(parents=True)

    variables = sglang_launch.environment(
        dataclasses.replace(launch, device="cuda", python=tmp_path / "bin" / "python")
    )

    assert variables["CUDA_HOME"] == str(toolkit)


def test_a_gpu_takes_its_own_kernels(launch):
    """Nothing of the way of a CPU is left."""
    words = sglang_launch.command(dataclasses.replace(launch, device="cuda"))

    assert not {"torch_native", "--disable-radix-cache", "--mem-fraction-static"} & set(words)
    assert option(words, "--sampling-backend") == "pytorch", "nothing is left to compile in the middle of a run"
    assert "SGLANG_USE_CPU_ENGINE" not in sglang_launch.environment(dataclasses.replace(launch, device="cuda"))


def test_its_streams_send_each_token_once(launch):
    """By default each event has the whole answer again."""
    assert "--incremental-streaming-output" in sglang_launch.command(launch)


def test_options_of_the_config_come_last_and_so_win(launch):
    """Argument parsers take the last of two."""
    words = sglang_launch.command(dataclasses.replace(launch, options=("--mem-fraction-static", "0.5")))

    assert words[-2:] == ["--mem-fraction-static", "0.5"]


def test_it_asks_no_hub_and_takes_its_share_of_the_cores(launch):
    """Model and tokenizer files are on the disk."""
    variables = sglang_launch.environment(launch)

    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("device", "may_sleep"), [("cuda", True), ("cuda", False), ("cpu", True), ("cpu", False)])
def test_it_can_free_the_memory_of_a_gpu_where_it_may_sleep(launch, device, may_sleep):
    """On a CPU there is no package for it, and without it the server would not start."""
    words = sglang_launch.command(dataclasses.replace(launch, device=device, may_sleep=may_sleep))

    assert ("--enable-memory-saver" in words) == (device == "cuda" and may_sleep)


def test_a_server_of_several_gpus_shares_out_its_model(launch):
    """Llama's own 32 heads and 11008 inner channels come apart into four."""
    one = dataclasses.replace(launch, device="cuda")

    assert "--tp-size" not in sglang_launch.command(one)
    assert option(sglang_launch.command(dataclasses.replace(one, gpus=4)), "--tp-size") == "4"
    with pytest.raises(EngineError, match="cannot split this model evenly"):
        sglang_launch.command(dataclasses.replace(one, gpus=3))
