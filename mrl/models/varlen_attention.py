"""Attention within rows of many lengths in one call of torch's flash kernel (`learner.attention_kernel = "varlen"`)."""

import torch
from torch import Tensor

from mrl.errors import ConfigError

AMPERE = (8, 0)
"""CUDA compute capability of the oldest GPUs that the kernel supports."""
MAX_HEAD_SIZE = 256
KEY, CURE = "learner.attention_kernel", 'set learner.attention_kernel = "rows"'


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the CUDA compute capability of a GPU; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def check_varlen(device: torch.device, *, head_size: int, softcap: float | None) -> None:
    """Raises ConfigError for a GPU or a model that the kernel does not support."""
    capability = capability_of(device)
    if capability is None or capability < AMPERE:
        name = "a CPU" if capability is None else torch.cuda.get_device_name(device)
        raise ConfigError(
            f"{KEY}: the kernel needs an Ampere GPU or a newer one",
            got=name,
            wanted="compute capability >= 8.0",
            cure=CURE,
        )
    if softcap is not None:
        raise ConfigError(f"{KEY}: the kernel does not support soft-capped scores", got=softcap, cure=CURE)
    if head_size > MAX_HEAD_SIZE or head_size % 8:
        raise ConfigError(
            f"{KEY}: the kernel does not support this head size",
            got=head_size,
            wanted=f"a multiple of 8, {MAX_HEAD_SIZE} at most",
            cure=CURE,
        )


def attend_at_once(
    query_RHD: Tensor,
    key_RKD: Tensor,
    value_RKD: Tensor,
    bounds_N: Tensor,
    *,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Return [R, H, D], causal attention within rows that lie end to end.

    bounds_N: int32, on the same device; row n has the positions from bounds_N[n] to bounds_N[n + 1] - 1.
    longest: tokens of the longest row.
    """
    # Imported here, as only few runs need it.
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if sliding_window is None else sliding_window - 1
    attended_RHD = varlen_attn(
        query_RHD,
        key_RKD,
        value_RKD,
        bounds_N,
        bounds_N,
        longest,
        longest,
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=True,
    )
    assert isinstance(attended_RHD, Tensor)
    return attended_RHD
