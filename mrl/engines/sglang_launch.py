"""How an SGLang server is started: loopback only, with a key of its callers, no hub traffic, token ids and no text.

Nor does it sample by rules of its own.
"""

import os
from pathlib import Path

from mrl.engines.dialect import Launch
from mrl.engines.environment import cuda_toolkit
from mrl.engines.family_limits import check_family, check_parts
from mrl.files import replace_file
from mrl.models.skeleton import PreTrainedConfig, config_of_folder, most_positions
from mrl.transport.endpoints import HOST

EXPERTS_ON_CPU = Path(__file__).parent / "inside" / "for_sglang" / "sglang_cpu_experts.py"
"""In place of SGLang's own entry, where it is to say experts on a CPU."""
SPARE_TOKENS = 7
"""Of its context SGLang gives that many to nobody: it refuses longer prompts, and ends answers that go on sooner."""


def command(launch: Launch) -> list[str]:
    """The command line. The context is that of the model at most, beyond which SGLang does not start.

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
    # FlashInfer, its choice on a GPU, would be compiled when the first answer with a `top_p` comes, and deaf meanwhile.
    words += ["--sampling-backend", "pytorch"]
    words += ["--incremental-streaming-output"]  # else each event of a stream has the whole answer again
    if launch.device == "cpu":
        words += ["--device", "cpu", "--attention-backend", "torch_native"]
        words += ["--disable-overlap-schedule", "--disable-radix-cache", "--mem-fraction-static", "0.2"]
        words += ["--max-total-tokens", str(launch.max_running * context_tokens), "--sleep-on-idle"]
    elif launch.may_sleep:  # a CPU has no memory saver, and asleep the server keeps what it has
        words += ["--enable-memory-saver"]
    if launch.tells_experts:
        words += ["--enable-return-routed-experts"]
    if launch.gpus > 1:
        check_parts("sglang", str(launch.model_folder / "config.json"), config, launch.gpus)
        words += ["--tp-size", str(launch.gpus)]
    return [*words, *launch.options]


def _key_file(folder: Path, key: str) -> Path:
    """Options that no command line shows. With a key of its own SGLang asks for it on all routes but /health, /ready
    and /metrics.
    """
    path = folder / "server.yaml"
    replace_file(path, f'api-key: "{key}"\n'.encode(), mode=0o600, sync=False)
    return path


def context_of(config: PreTrainedConfig, max_tokens: int) -> int:
    """Tokens of context for answers that end, with their prompts, at `max_tokens`."""
    return min(max_tokens + SPARE_TOKENS, most_positions(config))


def environment(launch: Launch) -> dict[str, str]:
    """Variables beside those of this process."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONWARNINGS": "ignore",  # some in each of its processes, which would push the last words out of sight
        "OMP_NUM_THREADS": str(launch.threads),
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # seconds until it sees that a caller has gone
    }
    if HOST not in os.environ:  # a run on this host alone: its processes, and the learner's broadcast, meet on loopback
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if launch.device == "cpu":
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}  # compiling takes seconds at each size
    else:  # it compiles kernels at its first start, by the ninja and the nvcc of its environment
        variables["PATH"] = os.pathsep.join([str(launch.python.parent), os.environ.get("PATH", os.defpath)])
        if toolkit := cuda_toolkit(launch.python):
            variables["CUDA_HOME"] = str(toolkit)
    return variables
