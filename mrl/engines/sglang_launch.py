"""Launch of an SGLang server: on loopback only, with a key for its callers, no hub traffic, token ids and no text.

The sampling defaults of the model's folder are switched off.
"""

import os
from pathlib import Path

from mrl.engines.environment import cuda_toolkit
from mrl.engines.family_limits import check_family, check_parts
from mrl.engines.server_backend import Launch
from mrl.files import replace_file
from mrl.models.skeleton import PreTrainedConfig, config_of_folder, most_positions
from mrl.transport.endpoints import HOST

EXPERTS_ON_CPU = Path(__file__).parent / "inside" / "for_sglang" / "sglang_cpu_experts.py"
"""Script that is run in place of SGLang's own entry, where it has to tell experts on a CPU."""
SPARE_TOKENS = 7
"""Tokens of its context that SGLang leaves unused: it refuses longer prompts, and ends longer answers earlier."""


def command(launch: Launch) -> list[str]:
    """Command line of a server. Its context is at most that of the model, beyond which SGLang does not start.

    Raises ModelFolderError, EngineError for a family that SGLang computes otherwise.
    """
    config = config_of_folder(launch.model_folder)
    context_tokens = context_of(config, launch.max_context_tokens)
    check_family(
        "sglang", launch.model_folder, config, device=launch.device, context_tokens=context_tokens - SPARE_TOKENS
    )
    on_cpu = launch.device == "cpu"
    entry = ["-P", str(EXPERTS_ON_CPU)] if launch.tells_experts and on_cpu else ["-m", "sglang.launch_server"]
    words = [str(launch.python), *entry, "--model-path", str(launch.model_folder)]
    words += ["--host", launch.host, "--port", str(launch.port), "--dtype", launch.dtype]
    if launch.private is not None and launch.key:
        words += ["--config", str(_key_file(launch.private, launch.key))]  # every user of the host reads command lines
    words += ["--context-length", str(context_tokens), "--max-running-requests", str(launch.max_running)]
    words += ["--random-seed", str(launch.seed), "--load-format", "safetensors", "--sampling-defaults", "openai"]
    words += ["--skip-tokenizer-init", "--grammar-backend", "none", "--skip-server-warmup"]
    words += ["--enable-metrics", "--decode-log-interval", "10", "--log-level", "error"]
    # FlashInfer, the default on a GPU, is compiled at the first answer with a `top_p`; no call is answered meanwhile.
    words += ["--sampling-backend", "pytorch"]
    words += ["--incremental-streaming-output"]  # else each event of a stream has the whole answer again
    if launch.device == "cpu":
        words += ["--device", "cpu", "--attention-backend", "torch_native"]
        words += ["--disable-overlap-schedule", "--disable-radix-cache", "--mem-fraction-static", "0.2"]
        words += ["--max-total-tokens", str(launch.max_running * context_tokens), "--sleep-on-idle"]
    elif launch.may_sleep:  # there is no memory saver for a CPU, where a sleeping server keeps its memory
        words += ["--enable-memory-saver"]
    if launch.tells_experts:
        words += ["--enable-return-routed-experts"]
    if launch.gpus > 1:
        check_parts("sglang", str(launch.model_folder / "config.json"), config, launch.gpus)
        words += ["--tp-size", str(launch.gpus)]
    return [*words, *launch.options]


def _key_file(folder: Path, key: str) -> Path:
    """Write the option with the key to a file, so that no command line shows it. With a key SGLang asks for it on all
    routes but /health, /ready and /metrics.
    """
    path = folder / "server.yaml"
    replace_file(path, f'api-key: "{key}"\n'.encode(), mode=0o600, sync=False)
    return path


def context_of(config: PreTrainedConfig, max_tokens: int) -> int:
    """Tokens of context that SGLang needs for `max_tokens` of prompt and answer; at most the model's positions."""
    return min(max_tokens + SPARE_TOKENS, most_positions(config))


def environment(launch: Launch) -> dict[str, str]:
    """Environment variables of a server, beside those of this process."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONWARNINGS": "ignore",  # each process gives some, which would push the last log lines out of sight
        "OMP_NUM_THREADS": str(launch.threads),
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # seconds until it notices that a caller has gone
    }
    if HOST not in os.environ:  # the run is on this host alone: the server, and the learner's broadcast, use loopback
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if launch.device == "cpu":
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}  # compiling takes seconds at each size
    else:  # it compiles kernels at its first start, by the ninja and the nvcc of its environment
        variables["PATH"] = os.pathsep.join([str(launch.python.parent), os.environ.get("PATH", os.defpath)])
        if toolkit := cuda_toolkit(launch.python):
            variables["CUDA_HOME"] = str(toolkit)
    return variables
