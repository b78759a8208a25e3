"""The configurations of papers fit on the GPUs that they promise, with the shapes of the models that they name.

Shapes are those of the released config.json files, written here by hand: no hub, no weights, no GPU.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.memory_plan import policy_memory
from mrl.memory_plan.needs import MIB
from mrl.memory_plan.run_memory import ProcessNeed, by_device, memory_plan, too_little
from mrl.models.skeleton import model_size
from mrl.processes.planning.placement import least_gpus, most_gpus
from mrl.processes.planning.plan import build_plan
from mrl.processes.preparation.completion import complete

ROOT = Path(__file__).parents[2]
PAPERS = sorted((ROOT / "configs" / "paper").glob("*.toml"))
GPUS = [str(number) for number in range(8)]
GPU_MIB = 80e9 / MIB
FEW = ["--pool.train_prompts", "16", "--pool.held_out_prompts", "8"]


def qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    """Qwen3 has eight heads of keys and values, of width 128, in all of its dense sizes."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
    )


def qwen2(hidden: int, inner: int, heads: int, cached: int, **keys: Any) -> Qwen2Config:
    """Qwen2.5 of 1.5B and 7B have 28 blocks."""
    shape = {"vocab_size": 151936, "num_hidden_layers": 28, "max_position_embeddings": 131072} | keys
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": cached}
    return Qwen2Config(hidden_size=hidden, intermediate_size=inner, **heads_of, **shape)


def llama(hidden: int, layers: int, heads: int, head_dim: int) -> LlamaConfig:
    """Llama 3.2."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )


QWEN3_2B, QWEN3_4B = qwen3(2048, 6144, 28, 16, tied=True), qwen3(2560, 9728, 36, 32, tied=True)
QWEN3_8B, LLAMA_3B = qwen3(4096, 12288, 36, 32, tied=False), llama(3072, 28, 24, 128)
SHAPES: dict[str, tuple[PreTrainedConfig, float]] = {
    "Qwen/Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, tied=True), 0.596),
    "Qwen/Qwen3-1.7B": (QWEN3_2B, 1.721),
    "Qwen/Qwen3-1.7B-Base": (QWEN3_2B, 1.721),
    "Qwen/Qwen3-4B": (QWEN3_4B, 4.022),
    "Qwen/Qwen3-4B-Base": (QWEN3_4B, 4.022),
    "Qwen/Qwen3-4B-Instruct-2507": (QWEN3_4B, 4.022),
    "Qwen/Qwen3-8B": (QWEN3_8B, 8.191),
    "Qwen/Qwen3-8B-Base": (QWEN3_8B, 8.191),
    "Qwen/Qwen3-32B": (qwen3(5120, 25600, 64, 64, tied=False), 32.762),
    "Qwen/Qwen2.5-Math-1.5B": (
        qwen2(1536, 8960, 12, 2, max_position_embeddings=4096, tie_word_embeddings=True),
        1.544,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (qwen2(1536, 8960, 12, 2, tie_word_embeddings=False), 1.777),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        qwen2(3584, 18944, 28, 4, vocab_size=152064, tie_word_embeddings=False),
        7.616,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (llama(2048, 16, 32, 64), 1.236),
    "meta-llama/Llama-3.2-3B-Instruct": (LLAMA_3B, 3.213),
    "OctoThinker/OctoThinker-3B-Hybrid-Base": (LLAMA_3B, 3.213),
    "HuggingFaceTB/SmolLM3-3B": (SmolLM3Config(), 3.075),
}
"""Source -> its shape, and billions of parameters as its card tells them."""


PROMPT_TOKENS = 1024
"""Those of the longest prompts that the papers allow, with which passes are full."""


def commands_in(path: Path) -> list[list[str]]:
    """The file, and the file with what each `mrl train` of its head changes."""
    head = path.read_text().split("\n[run]")[0].replace("\n#", "\n")
    told = re.findall(r"^ *(?:.*: )?mrl train (.*)$", re.sub(r"\\\n *", "", head), re.MULTILINE)
    return [[str(path)], *(shlex.split(words) for words in told)]


COMMANDS = [words for path in PAPERS for words in commands_in(path)]
QUICK = "mrl_math"


def planned(words: list[str], folder: Path) -> tuple[RunConfig, list[ProcessNeed]]:
    """What `mrl check` plans on eight GPUs, with the config.json of each model and nothing else of it."""
    path, overrides = ROOT / words[0], [*words[1:], *FEW]
    models = []
    for name, policy in load_config(path, overrides).policies.items():
        model = folder / policy.source.replace("/", "-")
        SHAPES[policy.source][0].save_pretrained(model)
        models += [f"--policies.{name}.model", str(model)]
    config = complete(load_config(path, [*overrides, *models])).config
    return config, memory_plan(config, build_plan(config, folder / "run", gpus=GPUS))


def commands(names: list[list[str]]) -> list[Any]:
    """As parameters; but for one of them they take some 15 s each."""
    return [
        pytest.param(
            words,
            id=words[words.index("--run.name") + 1] if "--run.name" in words else Path(words[0]).stem,
            marks=() if Path(words[0]).stem == QUICK else pytest.mark.thorough,
        )
        for words in names
    ]


@pytest.mark.parametrize("source", SHAPES)
def test_shapes_have_as_many_parameters_as_their_cards_say(source: str) -> None:
    """So that a number written wrong by hand is found; to a thousandth."""
    config, billions = SHAPES[source]
    assert model_size(config).parameters == pytest.approx(billions * 1e9, rel=1e-3)


@pytest.mark.parametrize("words", commands(COMMANDS))
def test_a_configuration_of_a_paper_fits_on_eight_gpus_of_80_gb(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every GPU has something to do, servers have theirs alone, learners are in shards, and prompts may be long.

    The file and each command of its head; where the head names a number of GiB, the plan of the file says it, too.
    """
    monkeypatch.setattr(policy_memory, "UNKNOWN_PROMPT_TOKENS", PROMPT_TOKENS)
    monkeypatch.chdir(tmp_path)
    config, needs = planned(words, tmp_path)
    for name, policy in config.policies.items():
        assert policy.rollout.engine == "vllm", name
        assert policy.frozen or (policy.learner.sharding, policy.learner.processes > 1) == ("shard", True), name
    assert least_gpus(config) == most_gpus(config) == len(GPUS)
    gib = {device: mib / 1024 for device, mib in by_device(needs).items()}
    assert set(gib) == set(GPUS)
    assert list(too_little(config, needs, float("inf"), dict.fromkeys(GPUS, GPU_MIB))) == []
    if len(words) == 1:
        (told,) = re.findall(r"fullest GPU has (\d+) GiB", Path(words[0]).read_text())
        assert round(max(gib.values())) == int(told)


@pytest.mark.thorough
def test_a_learner_of_one_gpu_would_not_have_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is one that can refuse: a 4B policy with its reference does not fit on one GPU of 80 GB."""
    monkeypatch.setattr(policy_memory, "UNKNOWN_PROMPT_TOKENS", PROMPT_TOKENS)
    monkeypatch.chdir(tmp_path)
    path = str(ROOT / "configs" / "paper" / "hacpo_qwen3_4b_instruct.toml")
    config, needs = planned([path, "--policies.qwen3.learner.processes", "1"], tmp_path)
    told = list(too_little(config, needs, float("inf"), dict.fromkeys(GPUS, GPU_MIB)))
    assert told[0].startswith("cuda 0: ")
    assert "policies.qwen3" in told[-1]
