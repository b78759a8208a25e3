"""Log-probabilities and entropies by Liger's fused kernel: the outputs of `logprobs`, with no logits in memory at all.

Liger-Kernel 0.8.5 has one kernel with an output for every token (`LigerFusedLinearScaledCrossEntropyFunction`), for
Hopper GPUs and bfloat16. On other GPUs it does in chunks what `logprobs` does, so `check_liger` refuses those. The
kernel keeps logits in float16 within a tile, gives entropies in bfloat16, and sums the head's gradient in bfloat16 over
waves of 1024 tokens, where the chunks sum in float32. It knows no soft cap. Liger's other fused losses reduce over
tokens, or multiply the gradient of all tokens by one number, which no objective here can use.

Shapes: T tokens, D hidden width, V vocabulary.
"""

import importlib.util

import torch
from torch import Tensor

from mrl.errors import ConfigError, MissingError

HOPPER = (9, 0)
"""CUDA compute capability of the only GPUs that the kernel supports."""
PACKAGES = ("liger_kernel", "triton", "cutlass.cute", "tvm_ffi")
"""Packages of the extra `liger`; CUTLASS comes in several packages, any of which may be missing."""
KEY, CURE = "learner.logprob_kernel", 'set learner.logprob_kernel = "chunked"'


def check_liger(device: torch.device, softcap: float | None) -> None:
    """Raises ConfigError for a GPU or a model that the kernel does not support, MissingError without its packages."""
    if softcap is not None:
        raise ConfigError(f"{KEY}: the kernel does not support soft-capped logits", got=softcap, cure=CURE)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability != HOPPER:
        name = "a CPU" if capability is None else torch.cuda.get_device_name(device)
        raise ConfigError(
            f"{KEY}: the kernel requires a Hopper GPU", got=name, wanted="compute capability 9.0", cure=CURE
        )
    if missing := missing_packages():
        raise MissingError(
            f"the package {missing[0]} is not installed", where=KEY, cure=f"pip install 'mrl[liger]', or {CURE}"
        )


def missing_packages() -> list[str]:
    """Return the `PACKAGES` that cannot be imported here."""
    return [name for name in PACKAGES if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def fused_logprobs(hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """Return [T] float32 log-probabilities of at least one target, with gradient by hidden states and head."""
    # Imported here, as it needs triton, and takes seconds to import.
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Fused

    nll_T: Tensor = Fused.apply(hidden_TD, head_VD, targets_T, temperature)
    return -nll_T


def fused_logprobs_and_entropy(
    hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return `fused_logprobs`, and [T] float32 entropies in nats, which were rounded to bfloat16."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Fused

    nll_T, entropy_T = Fused.apply(hidden_TD, head_VD, targets_T, temperature, return_entropy=True)
    return -nll_T, entropy_T.float()
