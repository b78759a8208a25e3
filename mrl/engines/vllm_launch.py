"""Launch of a vLLM server: on a socket file, no telemetry, token ids instead of text, control routes open.

Control routes ask for no key; the socket file lies in a folder of the user alone.

Without `--tokens-only` the server wants a tokenizer, and turns every token into text that nobody reads.
"""

import json
import os
from pathlib import Path

from mrl.engines.family_limits import check_family, check_parts
from mrl.engines.server_backend import Launch
from mrl.errors import ConfigError, EngineError
from mrl.models.skeleton import PreTrainedConfig, config_of_folder, head_dim, most_positions
from mrl.transport.endpoints import HOST

SOCKET = "http"
"""Name of the server's socket file in the private folder."""
OTHER_ENGINE = "choose another rollout.engine for this policy"
INSIDE = Path(__file__).parent / "inside"
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
READ_AT_ONCE = 4096
"""Tokens of prompts that one step on a CPU reads, or as many as the context has if that is more."""
SCORED_AT_ONCE = 1024
"""Tokens that one step on a GPU reads where texts are scored. vLLM (0.32) plans no memory for the logits of all tokens
of a step, in 16 bits and twice in 32: 1.6 GB with a vocabulary of 150,000, and 12 GB with its own 8,192 tokens."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def command(launch: Launch) -> list[str]:
    """Command line of a server. Raises EngineError for a model that vLLM does not serve on this device,
    ModelFolderError."""
    config = config_of_folder(launch.model_folder)
    context_tokens = min(launch.max_context_tokens, most_positions(config))
    check_family("vllm", launch.model_folder, config, device=launch.device, context_tokens=context_tokens)
    words = [str(launch.python), "-m", "vllm.entrypoints.cli.main", "serve", str(launch.model_folder)]
    if launch.private is not None:  # the control routes ask for no key
        words += ["--uds", str(launch.private / SOCKET)]
    else:
        words += ["--host", launch.host, "--port", str(launch.port)]
    words += ["--served-model-name", "policy"]
    words += ["--dtype", launch.dtype, "--seed", str(launch.seed)]
    words += ["--max-model-len", str(context_tokens), "--max-num-seqs", str(launch.max_running)]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    words += ["--enable-scale-out", "--tokens-only", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    if _sees_images(launch.model_folder):
        if launch.device == "cpu":
            what, cure = "vLLM's environment for CPUs lacks torchvision, which image models need", OTHER_ENGINE
            raise EngineError(what, where=str(launch.model_folder / "config.json"), got=config.model_type, cure=cure)
        words += ["--language-model-only"]  # the part that prepares images needs a tokenizer, and would end the server
    if launch.adapters is not None:
        words += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(_rank_of(launch.adapters.rank))]
        # Without names of layers the head gets an adapter, too, and vLLM ends when it scores a prompt.
        words += ["--lora-target-modules", *launch.adapters.layers]
    if launch.device == "cpu":
        _check_head_size(launch.model_folder, config)
        words += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        words += ["--worker-extension-cls", "vllm_cpu_worker.CpuWeightsExtension"]
        # A prompt that is read in parts ends vLLM if its request has a seed: torch cannot wind back a CPU generator.
        words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(READ_AT_ONCE, context_tokens))]
    else:
        words += ["--worker-extension-cls", "vllm_gpu_worker.GpuWeightsExtension"]
        # On a CPU vLLM does not start with this option, and /sleep gives up all requests and frees nothing.
        words += ["--enable-sleep-mode"] if launch.may_sleep else []
        if launch.scores:  # vLLM refuses fewer tokens than answers
            words += ["--max-num-batched-tokens", str(max(SCORED_AT_ONCE, launch.max_running))]
    if launch.tells_experts:
        if launch.device == "cpu":  # 0.32: "AuxOutput Connector requires Model Runner V2", which "requires Triton"
            what, cure = "vLLM on a CPU does not report the experts of its tokens", OTHER_ENGINE
            raise EngineError(what, where="learner.router_replay", cure=cure)
        words += ["--enable-return-routed-experts"]
    if launch.gpus > 1:
        check_parts("vllm", str(launch.model_folder / "config.json"), config, launch.gpus)
        words += ["--tensor-parallel-size", str(launch.gpus)]
    return [*words, *launch.options]


def environment(launch: Launch) -> dict[str, str]:
    """Environment variables of a server, beside those of this process."""
    variables = {
        "PYTHONPATH": str(INSIDE),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(launch.threads),
    }
    if launch.gpus > 1 and HOST not in os.environ:  # all processes of the run are on this host
        variables |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if launch.adapters is not None:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if launch.device == "cpu":
        variables |= {
            CPU_CACHE: str(cpu_cache_gib()),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with "uni": one process less to start and to talk to
            "TORCHDYNAMO_DISABLE": "1",  # the first request would wait half a minute for a compiled count of ranks
        }
    return variables


def cpu_cache_gib() -> int:
    """Size of the key-value cache on a CPU in GiB: what the environment says, or 1. Raises ConfigError."""
    told = os.environ.get(CPU_CACHE, "1")
    if not told.isdecimal():
        raise ConfigError(f"invalid environment variable {CPU_CACHE}", got=told, wanted="a whole number of GiB")
    return int(told)


def _sees_images(model_folder: Path) -> bool:
    """Whether the folder holds a model that reads images, of which the language model is a part."""
    described = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    return bool(described.get("vision_config")) and "text_config" in described


def _rank_of(rank: int) -> int:
    """Return the lowest rank among those that vLLM knows that has room for `rank`. Raises EngineError."""
    if rank > ADAPTER_RANKS[-1]:
        raise EngineError(
            "vLLM does not support adapters of this rank",
            where="learner.lora.rank",
            got=rank,
            wanted=f"<= {ADAPTER_RANKS[-1]}",
        )
    return next(known for known in ADAPTER_RANKS if known >= rank)


def _check_head_size(model_folder: Path, config: PreTrainedConfig) -> None:
    """Check the size of attention heads: vLLM on a CPU starts with one that it lacks, and ends at the first request.

    Raises EngineError.
    """
    size = head_dim(config)
    if size not in CPU_HEAD_SIZES:
        wanted = "one of " + ", ".join(map(str, CPU_HEAD_SIZES))
        where, cure = str(model_folder / "config.json"), OTHER_ENGINE
        raise EngineError(
            "vLLM on a CPU does not support this head_dim", where=where, got=size, wanted=wanted, cure=cure
        )
